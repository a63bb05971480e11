"""Launch scripts are read as bash reads them, and nothing in them runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.launch.shell.script import read_script
from megatron.launch.shell.syntax import ShellError

# prints its words, as JSON, in place of a program
REPORT = """python() { printf '%s\\0' python "$@"; printf '\\1'; }
deepspeed() { printf '%s\\0' deepspeed "$@"; printf '\\1'; }
"""
SNIPPETS = {
    "variables": 'A=1; B="x y"; python $A $B "$B" ${B} "a$A-b" \'$A\' "\\$A" a\\ b "" $NONE end',
    "defaults": 'D=; python ${X:-5} ${D:-6} ${D-7} ${X:=8} $X ${D:+9} "${Y:-two words}" ${Z:-two words} ${X+set}',
    "continued": "python --a 1 \\\n  --b 2 \\\n  # a comment \\\n",
    "quoted and continued": "ARGS=\"\n --a 1 \\\n --b 2 \\\n --c 'x'\n\"\npython $ARGS",
    "arrays": 'A=(--x 1\n  # note\n  --y "2 3")\nA+=(--z)\npython ${A[@]} "${A[@]}" ${#A[@]} ${A[1]} "${A[*]}" $A',
    "appended": 'A="--a"; A+=" --b"; python $A',
    "arithmetic": """N=2; M=$((N*3)); python $((M+1)) $(( ($N + 1) * 4 / 5 )) $((7%4)) $((2**10)) $((-7/2))
python $((N==2 && M>5)) $((!N)) $((-7%3))""",
    "if": "N=4\nif [ $N -eq 4 ]; then A=yes\nelif [ $N -gt 9 ]; then A=big\nelse A=no\nfi\npython $A",
    "else": 'if [[ "$N" == 4 ]]; then A=1; else A=2; fi; python $A',
    "tests": """E=""; F=x
[ -z "$E" ] && python empty
[ -n "$E" ] || python none
[ ! -z "$F" ] && python full
[ -z "$E"] && python unclosed
[ -z "$F"] || python broken
[[ $F == x* && -n $F ]] && python both
[ 3 -ne 2 -a -f /nowhere ] || python nofile
[[ ! ( $F == y ) ]] && python brackets
if (( 3 > 2 )); then python three; fi
test 1 -lt 2 && python less""",
    "for": "for N in 1 2 '3 4'; do python --n $N; done",
    "case": "M=7b\ncase $M in\n 7b|8b) L=32;;\n 70b) L=80 ;;\n *) L=1\nesac\npython $L",
    "functions": 'go() { python --first $1 --rest "${@:-}" ; }\ngo a',
    "groups": "{ A=1; python $A; }; ( python sub )",
    "positional": 'python $1 ${2:-none} $# "$@"',
    "cuts": "F=/a/b.tar.gz; python ${F%.*} ${F%%.*} ${F##*/} ${F#*/} ${F/b/c} ${#F} ${F//a/z}",
    "redirected": "python a > /dev/null 2>&1\npython b 2>&1 | cat\npython c >>/dev/null",
    "here-document": 'N=3\ncat <<EOT > /dev/null\n{"a": $N}\nEOT\npython after',
    "inner shell": 'CMD="A=1; cd . && python --x \\$A"; bash -c "$CMD"',
    "eval": "run=\"python --a 'b c'\"; eval $run",
    "exit": "python one; if [ 1 -eq 1 ]; then exit; fi; python two",
    "export": "export A=1 B='x y'; python $A \"$B\"",
    "substitutions": 'python $(echo a b) "$(dirname /x/y)" `basename /x/y.sh .sh`',
    "blanks": 'A=" a "; B="x"; python [$A] $B$A$B "$A"',
    "comments": "# first\npython a#b # c\n",
    "not": "if ! [ 1 -eq 2 ]; then python unequal; fi",
}


def of_bash(text: str, folder: Path) -> list[list[str]]:
    done = subprocess.run(
        ["bash", "-c", REPORT + "export -f python deepspeed\n" + text, "script", "first"],
        cwd=folder,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        check=False,
    )
    calls = done.stdout.decode().split("\1")[:-1]
    return [call.split("\0")[:-1] for call in calls]


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_script_is_read_as_bash_reads_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("bash") is None:
        pytest.skip("needs bash, which is the reference")
    monkeypatch.chdir(tmp_path)
    text = SNIPPETS[name]
    ours = read_script(text, ["first"], {}, "script")
    if name == "redirected":
        # what a file gets is not what the reference prints
        text = text.replace("> /dev/null", "").replace(">>/dev/null", "")
    expected = of_bash(text, tmp_path)
    assert expected
    assert [list(each.words) for each in ours.commands if each.words[0] == "python"] == expected


def test_nothing_in_a_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = """touch a; A=$(touch b); B=`touch c`; eval touch d; bash -c "touch e"; source ./f.sh
if touch g; then echo; fi
x=$((1)); cat > h <<EOT
$(touch i)
EOT
python $A $(touch j) | tee k
touch l > m"""
    (tmp_path / "f.sh").write_text("touch n")
    script = read_script(text, [], {}, "script")
    assert [path.name for path in tmp_path.iterdir()] == ["f.sh"]
    assert script.not_read == ["./f.sh"]
    assert script.values.readable(script.commands[-3].words[1]) == "$(touch b)"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a=1\nif nvidia-smi; then A=2; fi", "line 2: what follows depends on the result of a command"),
        ("while read line; do A=1; done", "line 1: what follows depends"),
        ("echo 'open", "line 1: a ' has no end"),
        ("if true; then python x", "fi is missing"),
        ("A=$((1/0))", r"\$\(\(1/0\)\) cannot be computed"),
        ("A=x; B=$((A+1))", "A='x' is not a whole number"),
        ("python ${A@Q}", r"\$\{A@Q\} is not read here"),
        ("cat <<EOT\nno end", "the here-document has no line EOT"),
        ("N=$(hostname); if [ $N = a ]; then B=1; fi", r"\$\(hostname\) is known only when it runs"),
        ("for i in 1 2; do for j in 1 2; do f; done; done; f() { f; }; f", "does not come to an end"),
        ("A=${B:?give B}", "B is not set: give B"),
        ("python a )", "is not expected here"),
    ],
)
def test_what_is_not_read_is_named_with_its_line(text: str, rule: str) -> None:
    with pytest.raises(ShellError, match=rule):
        read_script(text, [], {}, "script")


def test_here_documents_are_kept_by_their_file() -> None:
    text = "F=out/ds.json; N=3\ncat << EOT > $F\n{\"stage\": $N}\nEOT\ncat > raw <<'EOT'\n$N\nEOT\n"
    script = read_script(text, [], {}, "script")
    assert json.loads(script.files["out/ds.json"]) == {"stage": 3}
    assert script.files["raw"] == "$N\n"
