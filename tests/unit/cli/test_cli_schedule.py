import json

import pytest

from rayformer.cli.main import main


def test_schedules_are_drawn_and_compared(capsys):
    assert main(["schedule", "1f1b", "zb_h1", "zbv", "--pp", "2", "--microbatches", "2"]) == 0
    assert capsys.readouterr().out == (
        "1f1b\n"
        "pp0 F0 F1 .  .  B0--- .  B1---\n"
        "pp1 .  F0 B0--- F1 B1--- .  .\n\n"
        "zb_h1\n"
        "pp0 F0 F1 .  B0 W0 B1 W1\n"
        "pp1 .  F0 B0 F1 B1 W0 W1\n\n"
        "zbv\n"
        "pp0 F0   F1   .    F0c1 B0c1 F1c1 B1c1 B0   W0   B1   W1   W0c1 W1c1\n"
        "pp1 .    F0   F0c1 F1   F1c1 B0c1 B0   B1c1 B1   W0   W1   W0c1 W1c1\n\n"
        "  schedule  virtual  time  ideal  bubble of time  of ideal  microbatches held\n"
        "  1f1b      1        9     6      33.3 %          50.0 %    2\n"
        "  zb_h1     1        7     6      14.3 %          16.7 %    2\n"
        "  zbv       2        6.5   6      7.7 %           8.3 %     2\n"
    )


def test_costs_are_those_of_a_rank_or_of_every_stage(capsys):
    def values(*options):
        assert main(["schedule", "1f1b", "--pp", "2", "--microbatches", "4", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)[0]

    once = values("--costs", "F=10,B=12,W=8")
    assert (once["makespan"], once["ideal"], once["idle"]) == (150, 120, [30, 30])
    assert once["bubble_of_total"] == pytest.approx(0.2)
    assert once["timeline"][1][:2] == [["F0", 10, 20], ["B0", 20, 40]]
    uneven = values("--costs", "F=1,B=1,W=1", "--costs", "F=2,B=2,W=2")
    assert uneven["ideal"] == 24


def test_a_table_is_drawn_too(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("F0 F1 B0 B1 W0 W1\nF0 B0 F1 B1 W0 W1\n")
    assert main(["schedule", "--table", str(tmp_path / "mine.txt")]) == 0
    assert "pp1 .  F0 B0 F1 B1 W0 W1" in capsys.readouterr().out


def test_a_drawing_that_turns_back_is_a_table_too(tmp_path, capsys):
    assert main(["schedule", "zbv", "--pp", "2", "--microbatches", "2"]) == 0
    drawn, table = capsys.readouterr().out, tmp_path / "mine.txt"
    table.write_text("\n".join(line for line in drawn.splitlines() if line.startswith("pp")))
    assert main(["schedule", "--table", str(table), "--vee"]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == drawn.splitlines()[1:3]


def test_drawings_and_their_table_are_written_as_a_page(tmp_path, capsys):
    page = tmp_path / "schedules.html"
    assert main(["schedule", "1f1b", "zbv", "--pp", "2", "--microbatches", "2", "--html", str(page)]) == 0
    text = page.read_text()
    assert "<title>Pipeline schedules: 2 ranks, 2 microbatches</title>" in text
    assert "<td>33.3 %</td>" in text and "<b>zbv</b>" in text and text.count("<svg") == 2
    assert "pp1 W1c1" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "NAME='': there is nothing to draw; name one, or give --table"),
        (
            ["1f2b"],
            "schedule.name=1f2b: the schedules are gpipe, 1f1b, interleaved, zb_h1, zbv, table; did you mean 1f1b?",
        ),
        (["zbv", "--virtual", "3"], "zbv holds 2 chunks of the model on each rank; use layout.virtual_stages=2"),
        (["1f1b", "--costs", "F=1,B=1"], "--costs=F=1,B=1: it does not name three costs; write F=1,B=1,W=1"),
        (["1f1b", "--costs", "F=1,B=1,W=1", "--costs", "F=1,B=1,W=1"], "there are 4 stages; give it once, or once for"),
        (["1f1b", "--pp", "64", "--microbatches", "5000"], "their product is over 262144; use less of them"),
        (["--table", "no/such/file"], "--table=no/such/file: it can't be read: No such file or directory"),
    ],
)
def test_what_can_not_be_drawn_is_refused(arguments, said, capsys):
    assert main(["schedule", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_table_that_goes_wrong_is_refused(tmp_path, capsys):
    path = tmp_path / "mine.txt"
    path.write_text("F0 F1 B1 B0\nF0 B0 F1 B1\n")
    assert main(["schedule", "--table", str(path)]) == 2
    assert (
        "pp0 has B0 after B1: weight gradients are added in ascending order; mend the table" in capsys.readouterr().err
    )
