"""Job files: what is read, and every problem told at once, each with its keys, values, rule and way out."""

import re
from copy import deepcopy

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rayformer.config.job import Job
from rayformer.config.keys import is_list, keys_of, section_of
from rayformer.config.load import STAND_INS, job_from_tree, load_job
from rayformer.errors import ConfigError

SMALLEST = {
    "run": {"name": "t", "steps": 20},
    "model": {"layers": 4, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 257},
    "batch": {"global": 16, "seq": 32},
    "data": {"train": [{"path": "python-stdlib"}]},
}
FORM = re.compile(r"\S.*=.*: .+; .+")


def changed(changes):
    """The smallest job with dotted keys set; the value ``del`` takes a key out."""
    tree = deepcopy(SMALLEST)
    for key, value in changes.items():
        *sections, name = key.split(".", 1)
        at = tree.setdefault(sections[0], {}) if sections else tree
        if value is del_:
            del at[name]
        else:
            at[name] = value
    return tree


del_ = object()


def told(tree):
    with pytest.raises(ConfigError) as error:
        job_from_tree(tree)
    lines = str(error.value).splitlines()
    assert len(lines) == len(error.value.problems)
    return lines


def told_of(text, tmp_path, overrides=()):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_job(path, overrides)
    return str(error.value).splitlines()


def loaded(text, tmp_path, overrides=()):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_job(path, overrides)


TEXT = yaml.safe_dump(SMALLEST)


def test_the_smallest_job_has_defaults_and_lives_through_a_dump(tmp_path):
    job = loaded(TEXT, tmp_path)
    assert (job.batch.global_, job.batch.micro, job.optim.betas, job.data.train[0].weight) == (16, 1, (0.9, 0.95), 1.0)
    assert job_from_tree(job.dump()) == job
    assert job.dump()["batch"]["global"] == 16
    assert loaded(yaml.safe_dump(job.dump()), tmp_path) == job


def test_a_job_is_never_changed_and_its_tree_stays_as_it_was():
    tree = changed({"optim.lr": "fast", "run.name": del_})
    before = deepcopy(tree)
    told(tree)
    assert tree == before
    with pytest.raises(ValueError, match="frozen"):
        job_from_tree(SMALLEST).run.steps = 3


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("optim.learning_rte", "optim.lr"),
        ("optim.learning-rate", "optim.lr"),
        ("optim.weigth_decay", "optim.weight_decay"),
        ("model.num-layers", "model.layers"),
        ("model.num_attention_heads", "model.heads"),
        ("layout.tensor_model_paralel_size", "layout.tp"),
        ("layout.sequence-parallel", "layout.sequence_parallel"),
        ("batch.micro_batch_size", "batch.micro"),
        ("batch.global_", "batch.global"),
        ("run.nmae", "run.name"),
        ("optm", "optim"),
        ("checkpoints", "checkpoint"),
        # in the wrong section, or in none
        ("model.lr", "optim.lr"),
        ("optim.steps", "run.steps"),
        ("layout.micro", "batch.micro"),
        ("run.tp", "layout.tp"),
        ("lr", "optim.lr"),
        ("seq", "batch.seq"),
        ("num_layers", "model.layers"),
        ("tensor_model_parallel_size", "layout.tp"),
        ("every", "eval.every or checkpoint.every"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_name(key, nearest):
    (line,) = told(changed({key: 2}))
    assert line == f"{key}=2: there is no such key; did you mean {nearest}?"


def test_only_the_name_in_the_file_counts_not_the_one_in_the_code():
    missing, unknown = told(changed({"batch.global": del_, "batch.global_": 16}))
    assert missing.startswith("batch.global=missing: ")
    assert unknown.startswith("batch.global_=16: there is no such key; ")


def test_an_unknown_key_in_a_list_is_told_with_the_nearest_name():
    (line,) = told(changed({"data.train": [{"path": "a"}, {"path": "b", "wieght": 3}]}))
    assert line == "data.train[1].wieght=3: there is no such key; did you mean data.train[1].weight?"


def test_a_key_like_no_other_is_told_with_all_names_there():
    (line,) = told(changed({"eval.qqqq": 1}))
    assert line == "eval.qqqq=1: there is no such key; the keys here are every, batches"


def test_a_dotted_key_is_told_how_to_nest_it():
    tree = {**SMALLEST, "optim.lr": 0.1}
    assert told(tree) == ["optim.lr=0.1: there is no such key; write lr below optim:, indented"]


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("optim.lr", "fast", "optim.lr=fast: must be a number; write a number such as 0.001 or 1e-3"),
        ("optim.lr", True, "optim.lr=true: must be a number; "),
        ("optim.lr", 10**400, ": must be a number; "),
        ("optim.lr", float("nan"), "optim.lr=nan: must be a finite number; "),
        ("optim.lr", -1, "optim.lr=-1: must be above 0.0; use a number above 0.0"),
        ("optim.betas", [0.9], "optim.betas=[0.9]: it has too few entries; write it like [0.9, 0.95]"),
        ("optim.betas", [], "optim.betas=[]: it has too few entries; write it like [0.9, 0.95]"),
        ("optim.betas", [0.9] * 3, "it has too many entries; write it like [0.9, 0.95]"),
        ("optim.betas", ["0.9", 0.95], "optim.betas[0]=0.9: must be a number; "),
        ("optim.betas", [0.9, 1], "optim.betas[1]=1: must be below 1.0; "),
        ("optim.betas", 0.9, "optim.betas=0.9: must be a list; write it like [0.9, 0.95]"),
        ("optim.decay", "step", "optim.decay=step: must be constant, linear, cosine, inverse_sqrt or wsd; use "),
        ("optim.wsd_decay", "step", "optim.wsd_decay=step: must be linear, cosine, exponential or minus_sqrt; use "),
        ("optim.wsd_steps", 0, "optim.wsd_steps=0: must be at least 1; use 1 or more"),
        ("optim.weight_decay_end", -0.1, "optim.weight_decay_end=-0.1: must be at least 0.0; "),
        ("optim.zero", 3, "optim.zero=3: must be 0 or 1; "),
        ("batch.micro", 1.5, "batch.micro=1.5: must be an integer; write a whole number"),
        ("batch.micro", 2.0, "batch.micro=2.0: must be an integer; write a whole number"),
        ("batch.micro", True, "batch.micro=true: must be an integer; write a whole number"),
        ("batch.micro", "2", "batch.micro=2: must be an integer; write a whole number"),
        ("batch.micro", 0, "batch.micro=0: must be at least 1; use 1 or more"),
        ("batch.micro", None, "batch.micro=null: must be an integer; "),
        ("batch.virtual_ranks", 0, "batch.virtual_ranks=0: must be an integer of at least 1, or auto; "),
        ("layout.dp", "all", "layout.dp=all: must be an integer of at least 1, or auto; use a whole number or auto"),
        ("layout.dp", 1.5, "layout.dp=1.5: must be an integer of at least 1, or auto; "),
        ("layout.sequence_parallel", "yes", "layout.sequence_parallel=yes: must be true or false; "),
        ("layout.sequence_parallel", 1, "layout.sequence_parallel=1: must be true or false; "),
        ("run.seed", 2**63, f"run.seed={2**63}: must be below {2**63}; "),
        ("run.name", "a b", "run.name='a b': only letters, digits, dots, dashes and underscores, at most 64; "),
        ("run.name", "../x", "run.name=../x: only letters, digits, "),
        ("run.name", "a\n", r"run.name='a\n': only letters, digits, "),
        ("run.name", 7, "run.name=7: must be text; write it in quotes"),
        ("run.dir", "", "run.dir='': must not be empty; write it, or leave the key out"),
        ("run", 3, "run=3: must be a mapping of keys; write its keys below it, indented"),
        ("layout", None, "layout=null: must be a mapping of keys; write its keys below it, indented"),
        ("model", [1], "model=[1]: must be a mapping of keys; "),
        ("model.heads", {"n": 1}, "model.heads={...}: must be an integer; "),
        ("model.kv_heads", "x", "model.kv_heads=x: must be an integer; "),
        ("data.train", "x", "data.train=x: must be a list; write it like [{path: python-stdlib}]"),
        ("data.train", [], "data.train=[]: it has too few entries; write it like [{path: python-stdlib}]"),
        ("data.train", ["x"], "data.train[0]=x: must be a mapping of keys; "),
        ("data.train", [{"path": 3}], "data.train[0].path=3: must be text; "),
        ("data.train", [{"path": "a", "weight": 0}], "data.train[0].weight=0: must be above 0.0; "),
        ("data.split", [99, 1], "data.split=[99, 1]: it has too few entries; write it like [99.0, 1.0, 0.0]"),
        ("data.split", [99, 1, -1], "data.split[2]=-1: must be at least 0.0; use 0.0 or more"),
        ("cluster.device", "tpu", "cluster.device=tpu: must be auto, cpu or cuda; use auto, cpu or cuda"),
    ],
)
def test_a_bad_value_is_one_problem_that_says_what_to_write(key, value, line):
    (found,) = told(changed({key: value}))
    assert line in found
    assert FORM.fullmatch(found)


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("run.name", "run.name=missing: it has no default and must be given; add it: Names the run"),
        ("model.ffn", "model.ffn=missing: it has no default and must be given; add it: Width inside"),
        ("batch.global", "batch.global=missing: it has no default and must be given; add it: Samples in one step"),
        ("data.train", "data.train=missing: it has no default and must be given; add it: The corpora"),
        ("run", "run=missing: it has no default and must be given; add it: a mapping with at least name, steps"),
        ("data", "data=missing: it has no default and must be given; add it: a mapping with at least train"),
    ],
)
def test_a_missing_key_is_one_problem_that_says_what_it_is(key, line):
    (found,) = told(changed({key: del_}))
    assert found.startswith(line)


ALL_KEYS = [
    f"{section}.{key}"
    for section, field in Job.model_fields.items()
    if not is_list(field)
    for key in keys_of(section_of(field) or Job)
]


# A job in which nearly every rule is close to breaking.
TIGHT = {
    "layout.tp": 2, "layout.pp": 4, "layout.dp": 4, "model.kv_heads": 2, "batch.micro": 2, "batch.virtual_ranks": 8,
    "run.stop_at": 20, "optim.warmup_steps": 20, "optim.lr": 1e-4, "optim.min_lr": 1e-4, "optim.decay_steps": 20,
}  # fmt: skip


FREE_TEXT = {
    "run.dir",
    "schedule.name",
    "schedule.table",
    "data.tokenizer",
    "checkpoint.dir",
    "checkpoint.resume",
    "checkpoint.init_from",
    "cluster.address",
    "layout.stages",
}


@pytest.mark.parametrize("bad", ["?!", -7, []])
@pytest.mark.parametrize("key", ALL_KEYS)
def test_no_problem_is_told_that_is_only_a_consequence_of_a_bad_value(key, bad):
    tree = changed({**TIGHT, key: bad})
    if (bad == "?!" and key in FREE_TEXT) or (bad == [] and key == "data.ignore_ids"):
        assert job_from_tree(tree)
        return
    with pytest.raises(ConfigError) as error:
        job_from_tree(tree)
    assert {name.split("[")[0] for problem in error.value.problems for name in problem.keys} == {key}


def test_the_job_with_tight_rules_breaks_none():
    assert job_from_tree(changed(TIGHT))


LISTS = {section for section, field in Job.model_fields.items() if is_list(field)}


@pytest.mark.parametrize("section", [section for section in Job.model_fields if section not in LISTS])
@pytest.mark.parametrize("bad", [7, None, []])
def test_a_bad_section_is_one_problem(section, bad):
    (line,) = told(changed({**TIGHT, section: bad}))
    assert line.startswith(f"{section}={'null' if bad is None else bad}: must be a mapping")


@pytest.mark.parametrize("bad", [7, None, {}])
def test_a_bad_list_of_sections_is_one_problem(bad):
    (line,) = told(changed({**TIGHT, "faults": bad}))
    shown = "null" if bad is None else "7" if bad == 7 else "{...}"
    assert line == f"faults={shown}: must be a list; write it like [{{kill: pp1.dp0, step: 7, at: backward}}]"


def test_a_bad_entry_of_a_list_hides_no_other():
    tree = changed(
        {**TIGHT, "faults": [{"kill": 7}, {"kill": "pp0", "step": 1, "tims": 2}, 3, {"kill": "pp0", "step": 1}]}
    )
    assert [line.partition(":")[0] for line in told(tree)] == [
        "faults[0].kill=7",
        "faults[0].step=missing",
        "faults[1].tims=2",
        "faults[2]=3",
    ]


def test_every_required_key_has_a_stand_in():
    """Without one, reading a job that lacks the key would never end."""
    for section, field in Job.model_fields.items():
        if section in LISTS:
            assert f"{section}[i]" in STAND_INS
            continue
        inner = keys_of(section_of(field) or Job)
        required = [f"{section}.{key}" for key, f in inner.items() if f.is_required()]
        assert set(required) <= set(STAND_INS)
        assert (section in STAND_INS) == bool(required)


def test_stand_ins_break_no_rule():
    lists = {section: [STAND_INS[f"{section}[i]"]] for section in LISTS}
    assert job_from_tree(deepcopy({key: {} for key in Job.model_fields} | lists | _nested(STAND_INS)))


def _nested(flat):
    tree = {}
    for key, value in flat.items():
        section, _, name = key.partition(".")
        if name:
            tree.setdefault(section, {})[name] = value
    return tree


def test_all_problems_are_told_at_once_rules_beside_types(tmp_path):
    text = """
run: {name: a b, steps: 20, stop_at: 30}
model: {layers: 4, hidden: 64, heads: 4, ffn: 96, vocab: 257, num-heads: 3}
layout: {tp: 3, pp: 9, cp: 2}
batch: {global: 15, micro: 2, seq: 32}
optim: {lr: fast, min_lr: 2.0, zero: 1, zero: 0}
data: {trian: []}
"""
    lines = told_of(text, tmp_path, ["checkpoint.evry=3", "nonsense"])
    expected = [
        "optim.zero=0: it is given twice, in lines 6 and 6; keep one of them",
        "--set=nonsense: an override is KEY=VALUE; write --set a.b=c",
        "run.name='a b': only letters",
        "model.num-heads=3: there is no such key; did you mean model.heads?",
        "optim.lr=fast: must be a number",
        "data.train=missing",
        "data.trian=[]: there is no such key; did you mean data.train?",
        "checkpoint.evry=3: there is no such key; did you mean checkpoint.every?",
        "layout.cp=2: only 1 is possible so far",
        "layout.tp=3, model.heads=4: tp must divide heads; use tp 1, 2 or 4",
        "layout.pp=9, model.layers=4: every pipeline stage needs at least one layer; use pp of at most 4",
        "run.stop_at=30, run.steps=20: the run ends before stop_at",
        "batch.global=15, batch.micro=2, ",
    ]
    assert [line[: len(start)] for line, start in zip(lines, expected)] == expected
    assert len(lines) == len(expected)  # nothing of min_lr, as lr is not known


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "a job file is a mapping of sections, and this holds nothing; start from one in jobs/"),
        ("# nothing\n", "this holds nothing; "),
        ("{}", "this holds nothing; "),
        ("- run\n- model\n", "this holds a list; "),
        ("run", "this holds only 'run'; "),
        ("42", "this holds only 42; "),
        ("run:\n  name: x\n steps: 3\n", "line 3: while parsing a block mapping, expected <block end>"),
        ("run: {name: x\nmodel: 3\n", "line 2: while parsing a flow mapping, "),
        ("run:\n\tname: x\n", "line 2: while scanning for the next token, found character '\\t'"),
        ("run: 'x\n", "while scanning a quoted scalar, found unexpected end of stream"),
        ("a: 1\n---\nb: 2\n", "line 2: expected a single document in the stream, but found another document"),
        ("run: &r {name: x}\nmodel: *r\n", "line 2: a job file has no aliases"),
        ("a: &a [*a]\n", "line 1: a job file has no aliases"),
        ("run: {1: 2}\n", "line 1: a key that is not text"),
        ("? [a, b]\n: 1\n", "line 1: a key that is not text"),
        ("run: !!python/object:os.system {}\n", "line 1: could not determine a constructor for the tag"),
        ("run: !!int x\n", "invalid literal"),
        ("run: !!timestamp 2024-13-45\n", "month"),
        ("run: \x00\n", "special characters are not allowed"),
        ("[" * 2000, "it is nested too deeply"),
    ],
)
def test_what_is_no_job_file_is_one_problem_with_its_file_and_line(tmp_path, text, line):
    (found,) = told_of(text, tmp_path)
    assert found.startswith(f"JOB={tmp_path / 'job.yaml'}: ")
    assert line in found
    assert FORM.fullmatch(found)


@pytest.mark.parametrize("make", ["absent", "folder", "binary"])
def test_a_file_that_can_not_be_read_is_one_problem(tmp_path, make):
    path = tmp_path / "job.yaml"
    if make == "folder":
        path.mkdir()
    if make == "binary":
        path.write_bytes(b"run: \xff")
    with pytest.raises(ConfigError) as error:
        load_job(path)
    reason = {"absent": "No such file", "folder": "Is a directory", "binary": "byte 5 is not UTF-8 text"}[make]
    (problem,) = error.value.problems
    assert reason in problem.rule


def test_a_duplicate_key_is_told_with_its_full_name_and_both_lines(tmp_path):
    text = TEXT + "optim:\n  lr: 0.1\n  clip: 1.0\n  lr: 0.2\nschedule: {name: 1f1b}\nschedule: {name: gpipe}\n"
    first = TEXT.count("\n") + 2
    lines = told_of(text, tmp_path)
    assert lines == [
        f"optim.lr=0.2: it is given twice, in lines {first} and {first + 2}; keep one of them",
        f"schedule={{...}}: it is given twice, in lines {first + 3} and {first + 4}; keep one of them",
    ]
    (line,) = told_of(TEXT.replace("- path: python-stdlib", "- {path: a, path: b}"), tmp_path)
    assert line.startswith("data.train[0].path=b: it is given twice")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E+2", 100.0), ("1.5e-3", 1.5e-3), (".5", 0.5), ("1.", 1.0), ("3", 3.0), ("1_000.5", 1000.5)],
)
def test_every_way_to_write_a_number_is_a_number(tmp_path, text, value):
    assert loaded(TEXT + f"optim: {{lr: {text}}}\n", tmp_path).optim.lr == value


@pytest.mark.parametrize("name", ["2024-01-31", "no", "on", "1e", "e3", "007", "1.2.3", "true_north", "nil"])
def test_a_name_that_yaml_1_1_would_take_for_something_else_stays_text(tmp_path, name):
    assert loaded(TEXT.replace("name: t", f"name: {name}"), tmp_path).run.name == name


@pytest.mark.parametrize("text", ["010", "0x10", "1:30", "yes", "1e1", "1.0", "0o7", "~", ".inf"])
def test_a_count_is_written_as_a_decimal_number(tmp_path, text):
    (line,) = told_of(TEXT + f"eval: {{batches: {text}}}\n", tmp_path)
    assert line.endswith("must be an integer; write a whole number")


def test_a_large_count_may_have_underscores(tmp_path):
    assert loaded(TEXT.replace("steps: 20", "steps: 1_000_000"), tmp_path).run.steps == 1_000_000


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run.steps=7", "run.steps", 7),
        ("optim.lr=1e-3", "optim.lr", 1e-3),
        ("run.name=other", "run.name", "other"),
        ("run.dir=a=b", "run.dir", "a=b"),
        ("layout.dp=auto", "layout.dp", "auto"),
        ("run.stop_at=null", "run.stop_at", None),
        ("run.stop_at=", "run.stop_at", None),
        ("optim.betas=[0.8, 0.9]", "optim.betas", [0.8, 0.9]),
        ("optim.betas[1]=0.9", None, None),
        ("data.train=[{path: x, weight: 2}]", "data.train", [{"path": "x", "weight": 2.0}]),
        ("data.train[0].path=x", "data.train", [{"path": "x", "weight": 1.0}]),
        ("data.train[0].weight=3", "data.train", [{"path": "python-stdlib", "weight": 3.0}]),
        ("schedule={name: gpipe}", "schedule.name", "gpipe"),
        ("schedule.name=gpipe", "schedule.name", "gpipe"),
    ],
)
def test_an_override_sets_a_key(tmp_path, override, key, value):
    if key is None:
        (line,) = told_of(TEXT, tmp_path, [override])
        assert line == "optim.betas[1]=0.9: there is no optim.betas[1] to set; set the whole list, written like [a, b]"
        return
    section, name = key.split(".")
    assert loaded(TEXT, tmp_path, [override]).dump()[section][name] == value


def test_the_last_override_of_a_key_holds(tmp_path):
    assert loaded(TEXT, tmp_path, ["run.steps=7", "run.steps=8", "optim.lr=0.1"]).run.steps == 8


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("run.steps", "--set=run.steps: an override is KEY=VALUE; write --set a.b=c"),
        ("=3", "--set==3: an override is KEY=VALUE; "),
        ("run..steps=3", "--set=run..steps=3: an override is KEY=VALUE; "),
        (".=3", "an override is KEY=VALUE; "),
        ("run. steps=3", "--set='run. steps=3': an override is KEY=VALUE; "),
        ("run.steps=[", "run.steps=[: the value is not YAML (line 1: while parsing a flow node"),
        ("run={a: 1, a: 2}", "a=2: it is given twice, in lines 1 and 1; "),
        ("run.stpes=3", "run.stpes=3: there is no such key; did you mean run.steps?"),
        ("run.steps=three", "run.steps=three: must be an integer; "),
        ("run.name.x=3", "run.name={...}: must be text; "),
        ("data.train[1].path=x", "data.train[1].path=x: there is no data.train[1] to set; "),
        ("data.train.path=x", "data.train.path=x: there is no data.train.path to set; "),
        ("run[0]=x", "run[0]=x: there is no run[0] to set; "),
        ("layout.tp=3", "layout.tp=3, model.heads=4: tp must divide heads; use tp 1, 2 or 4"),
    ],
)
def test_a_bad_override_is_a_problem(tmp_path, override, line):
    lines = told_of(TEXT, tmp_path, [override])
    assert any(line in found for found in lines)
    assert all(FORM.fullmatch(found) for found in lines)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["auto", "1f1b", "cosine", 10**400, -1.5]),
)  # fmt: skip
names = st.one_of(st.sampled_from([*(key.split(".")[1] for key in ALL_KEYS), *Job.model_fields]), st.text(max_size=6))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6
)


@st.composite
def mutated(draw):
    """A good job with some keys, at any level, set to anything or taken out."""
    tree = changed(TIGHT)
    for _ in range(draw(st.integers(1, 4))):
        at, deep = tree, draw(st.integers(0, 3))
        for _ in range(deep):
            inner = [v for v in (at.values() if isinstance(at, dict) else at) if v and isinstance(v, (dict, list))]
            if inner:
                at = draw(st.sampled_from(inner))
        if isinstance(at, list):
            at[draw(st.integers(0, len(at) - 1))] = draw(values)
        elif at and draw(st.booleans()):
            known = draw(st.sampled_from(sorted(at)))
            if draw(st.booleans()):
                del at[known]
            else:
                at[known] = draw(values)
        else:
            at[draw(names)] = draw(values)
    return tree


@settings(max_examples=250)
@given(mutated())
def test_a_mutated_job_is_read_or_told_in_the_one_form(tree):
    try:
        job = job_from_tree(tree)
    except ConfigError as error:
        assert error.problems
        for problem in error.problems:
            assert FORM.fullmatch(str(problem)), str(problem)
            assert len(str(problem).splitlines()) == 1
    else:
        assert job_from_tree(job.dump()) == job


pieces = st.sampled_from([*":{}[],&*!|>'\"%@`#-?~\t\n 0", "\x00", "é", "&a ", "*a", "<<: "])


@settings(max_examples=150)
@given(st.data())
def test_text_with_a_few_characters_changed_is_read_or_told(tmp_path_factory, data):
    text = TEXT
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(pieces) + text[at:]
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        load_job(path)
    except ConfigError as error:
        assert error.problems
        assert all(FORM.fullmatch(str(problem)) for problem in error.problems), str(error)
