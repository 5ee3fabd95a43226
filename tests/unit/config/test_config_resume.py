"""Resume: where a run runs may change, what decides its curve may not."""

from copy import deepcopy

import pytest

from rayformer.config.job import Job, resolve
from rayformer.config.keys import is_list, keys_of, section_of
from rayformer.config.load import job_from_tree
from rayformer.config.resume import resume_problems

RECORDED = resolve(
    job_from_tree(
        {
            "run": {"name": "t", "steps": 20},
            "model": {"layers": 4, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 257},
            "batch": {"global": 16, "seq": 32},
            "data": {"train": [{"path": "python-stdlib"}]},
        }
    ),
    dp=2,
    recorded={},
).dump()

MAY_CHANGE = {"optim.zero", "optim.overlap", "batch.micro", "run.stop_at", "run.name", "run.dir"}
SECTIONS_THAT_MAY_CHANGE = {"layout", "schedule", "recovery", "checkpoint", "observe", "cluster", "faults", "recompute"}
ALL_KEYS = [
    f"{section}.{key}"
    for section, field in Job.model_fields.items()
    if not is_list(field)
    for key in keys_of(section_of(field) or Job)
]


def told(changes, allowed=()):
    asked = deepcopy(RECORDED)
    for key, value in changes.items():
        section, name = key.split(".")
        asked[section][name] = value
    return [str(problem) for problem in resume_problems(RECORDED, asked, allowed=allowed, checkpoint="runs/t/step-7")]


@pytest.mark.parametrize("key", ALL_KEYS)
def test_only_the_listed_keys_may_change(key):
    section = key.split(".")[0]
    free = section in SECTIONS_THAT_MAY_CHANGE or key in MAY_CHANGE
    lines = told({key: 987})
    assert len(lines) == (0 if free else 1)
    assert all(line.startswith(f"{key}=987: ") for line in lines)
    assert told({key: 987}, allowed=[key]) == []


def test_faults_may_change():
    asked = {**RECORDED, "faults": [{"kill": "pp0", "step": 7}]}
    assert resume_problems(RECORDED, asked, allowed=(), checkpoint="c") == []


def test_an_unchanged_job_goes_on():
    assert told({}) == []


def test_a_refused_change_shows_both_values_the_checkpoint_and_the_ways_out():
    assert told({"optim.lr": 0.5, "batch.seq": 64}, allowed=["batch.seq"]) == [
        "optim.lr=0.5: the run in runs/t/step-7 was started with 0.001, and this may not change on resume;"
        " set it back, or --allow-change optim.lr, or --fresh to start anew"
    ]


@pytest.mark.parametrize(
    ("dp", "virtual_ranks", "refused"),
    [
        (1, 2, False),  # fewer actors run the same virtual ranks
        (4, 4, False),  # a dp beyond them becomes their number
        (2, 1, True),
        (1, 1, True),
        (1, 4, True),
        (4, 8, True),
    ],
)
def test_virtual_ranks_change_only_where_dp_outgrows_them(dp, virtual_ranks, refused):
    lines = told({"layout.dp": dp, "batch.virtual_ranks": virtual_ranks})
    assert [line.split(":")[0] for line in lines] == ([f"batch.virtual_ranks={virtual_ranks}"] if refused else [])


def test_another_corpus_is_a_change():
    (line,) = told({"data.train": [{"path": "other", "weight": 1.0}]})
    assert "was started with [{'path': 'python-stdlib', 'weight': 1.0}]" in line


def test_a_key_that_the_checkpoint_lacks_is_a_change():
    asked = deepcopy(RECORDED)
    asked["model"]["new"] = 3
    (problem,) = resume_problems(RECORDED, asked, allowed=(), checkpoint="c")
    assert str(problem).startswith("model.new=3: the run in c was started with None")
