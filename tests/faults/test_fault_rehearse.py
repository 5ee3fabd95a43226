"""``rayformer rehearse``: a job that survives a lost cell and a resume is told so, and one that does not, why."""

import json

import pytest
from rayjobs import folder_of, write_job


@pytest.mark.timeout(290)
def test_a_job_that_survives_is_told_what_it_survived(standing, start, documents, tmp_path):
    job = write_job(
        tmp_path, "sound", corpus=documents, address=standing.address, steps=100_000, layout={"dp": 2},
        batch={"global": 32, "micro": 2, "seq": 16},
    )  # fmt: skip
    found = tmp_path / "found.json"
    rehearsal = start("rayformer.cli.main", "rehearse", job, "--json", found)
    assert rehearsal.finish(260) == 0, rehearsal.output
    lost, micro, dp = "the loss of pp0.dp1.cp0.tp0", "a resume with batch.micro=1", "a resume with layout.dp=1"
    assert rehearsal.output.endswith(f"\nthis job survives: {lost}, {micro}, {dp}\n")
    told = {trial["tried"]: trial["in_words"] for trial in json.loads(found.read_text())["trials"]}
    assert "from holder" in told[lost] and told[lost].endswith("no step done again; the same bits")
    assert told[micro].endswith("1e-05 being rounding")
    assert told[dp] == "went on after step 3; the same bits"
    assert not folder_of(job).exists()


@pytest.mark.timeout(290)
def test_a_job_whose_first_loss_is_its_end_is_told_the_remedy(standing, start, documents, tmp_path):
    job = write_job(
        tmp_path, "frail", corpus=documents, address=standing.address, batch={"global": 1, "micro": 1, "seq": 16},
        recovery={"max_failures": 0},
    )  # fmt: skip
    rehearsal = start("rayformer.cli.main", "rehearse", job)
    assert rehearsal.finish(260) == 1, rehearsal.output
    assert "this job survives" not in rehearsal.output
    died = "  | error: the run frail-rehearsal-struck failed: cell pp0.dp0.cp0.tp0 (worker-0000): its process died: "
    assert died in rehearsal.output
    last = rehearsal.output.splitlines()[-1]
    assert last.startswith("error: recovery.max_failures=0: the loss of pp0.dp0.cp0.tp0 in step 5 ended the run, ")
    skipped = [line for line in rehearsal.output.splitlines() if " skipped " in line]
    assert len(skipped) == 2 and all("batch.global=1, " in line for line in skipped)
