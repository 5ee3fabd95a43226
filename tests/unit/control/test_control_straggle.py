"""Stragglers: cells that compute twice as long as those that do the same, told once."""

from itertools import count

from rayformer.control.straggle import SAMPLES, StragglerJudge, Worked


class Run:
    """Steps in which every cell computes so long."""

    def __init__(self):
        self.judge, self.steps = StragglerJudge(), count(1)

    def step(self, **seconds):
        """The stragglers told in one step; a cell is written as pp0_dp1."""
        step = next(self.steps)
        cells = {f"{name.replace('_', '.')}.cp0.tp0": Worked(step=step, seconds=s) for name, s in seconds.items()}
        return self.judge.judge(cells)

    def steps_of(self, num=SAMPLES + 1, **seconds):
        return [told for _ in range(num) for told in self.step(**seconds)]


def test_a_cell_that_takes_twice_as_long_as_its_peers_is_told_once():
    (told,) = Run().steps_of(30, pp0_dp0=0.1, pp0_dp1=0.1, pp0_dp2=0.21)
    assert (told.cell, told.compute_s, told.peers_s) == ("pp0.dp2.cp0.tp0", 0.21, 0.1)
    assert "0.210 s a step, 2.1 times as long as the other cells of its stage" in told.message


def test_another_stage_may_have_more_to_do():
    assert Run().steps_of(30, pp0_dp0=0.1, pp0_dp1=0.1, pp1_dp0=0.5, pp1_dp1=0.5) == []
    assert Run().steps_of(30, pp0_dp0=0.1, pp1_dp0=0.5) == []


def test_the_first_step_and_single_slow_ones_do_not_count():
    run = Run()
    assert run.step(pp0_dp0=0.1, pp0_dp1=60.0) == []
    for slow in (9.0, 0.1, 0.1) * SAMPLES:
        assert run.step(pp0_dp0=0.1, pp0_dp1=slow) == []


def test_a_step_that_is_seen_again_counts_once():
    judge = StragglerJudge()
    for _ in range(50):
        seen = {"pp0.dp0": Worked(step=2, seconds=0.1), "pp0.dp1": Worked(step=2, seconds=1.0)}
        assert judge.judge(seen) == []


def test_who_kept_up_for_a_while_is_told_again():
    run = Run()
    assert len(run.steps_of(pp0_dp0=0.1, pp0_dp1=0.3)) == 1
    assert run.steps_of(pp0_dp0=0.1, pp0_dp1=0.18) == []  # better, and not good yet
    assert run.steps_of(pp0_dp0=0.1, pp0_dp1=0.3) == []
    assert run.steps_of(pp0_dp0=0.1, pp0_dp1=0.1) == []
    assert len(run.steps_of(pp0_dp0=0.1, pp0_dp1=0.3)) == 1


def test_a_new_generation_begins_anew():
    run = Run()
    assert len(run.steps_of(pp0_dp0=0.1, pp0_dp1=0.3)) == 1
    run.judge.start_generation()
    assert run.steps_of(SAMPLES, pp0_dp0=0.1, pp0_dp1=0.3) == []
    assert len(run.step(pp0_dp0=0.1, pp0_dp1=0.3)) == 1
