"""Check that a script beside the command is the published one, which this project replaces, without code of its own.

The scripts named on a command line are not run: what they do is done here. So a file of that name whose code differs
from every published one is refused, rather than passed over. A trainer in it can be trained: `--trainer FILE.py:Class`.

Sources: the releases of huggingface/optimum-habana and its state of January 2026, and of finetune.py
NAVER-INTEL-Co-Lab/gaudi-finetune-lora-deepspeed.
"""

from __future__ import annotations

import hashlib
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.launch.dialects.script_code import ScriptCode, read_code
from megatron.options.flags import cut, dashed

# NL ends an empty line, or one within a statement; the end of a statement is a NEWLINE
LEFT_OUT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
# the text of an indent does not count: tabs, or another width, make no other code
LAYOUT = {tokenize.NEWLINE: "\n", tokenize.INDENT: ">", tokenize.DEDENT: "<"}
# digests of the published files, by name
_DIGESTS = {
    "sft": (
        "78e62794b7ac19e2 a16139a9f78feae3 b0364b38d1b71c48 e4cb5047c2db5457 edc5384a7db9c03f afcb7c0efce5a833 "
        "0bf9c2e53c9d00d7"
    ),
    "dpo": "9e1c17cfcb1c77af d471b207d8d3daf2 d15979f9f6452c53 302aec89af44af20",
    "merge_peft_adapter": "495aa260d374aa9f",
    "run_generation": (
        "25688dfe7df18072 9b0a483a05f731c6 7fe448d6e2eb84d8 944aa9f1429fc8bf 4903c12ca47102c8 50a9c63e83c31181 "
        "8d0cdd3bcf217fe5 66d96937172bcca1 ed57a98cb79c470e 3ee24b332a68077f a3ab38145b403742 0240bcd118cd6010 "
        "0d092114b6756948 6b66c7a571fcf442 7f0e1ba0d9f23bfa 864eaf87a742afd2 7026d9c9d5df603d 40423a32324d6aea "
        "0bad3cf0de015cda b70c9f6a90918bd6 4ecd69c1d27de266"
    ),
    "finetune": "3832bcda7132d278 7cb4e6f561467bd4 50c6548ce28c63f1",
    "dataloader": "6ca880186932d291",
    "data_module": "257a96b2276d3272",
    "utils": "d483edd7acdf8283",
}
PUBLISHED = {name: tuple(digests.split()) for name, digests in _DIGESTS.items()}
BESIDE = {"finetune": ("dataloader", "data_module", "utils")}
"""Modules beside a script that it takes its code from."""
TRAINED, TRAINER = "finetune", "CustomTrainer"
"""Script that trains by a class in its dataloader.py, and the class."""


def digest(text: str) -> str:
    """Return a digest of Python code that comments, docstrings and blank lines do not change.

    Raises tokenize.TokenError or SyntaxError for text that is not Python.
    """
    tokens = [token for token in _tokens(text) if token.type not in LEFT_OUT]
    words: list[str] = []
    begins_statement = True
    for index, token in enumerate(tokens):
        ends = index + 1 == len(tokens) or tokens[index + 1].type == tokenize.NEWLINE
        if token.type == tokenize.STRING and begins_statement and ends:
            continue  # with its NEWLINE, since the next token still begins a statement
        if not (token.type == tokenize.NEWLINE and begins_statement):
            words.append(LAYOUT.get(token.type, token.string))
        begins_statement = token.type in LAYOUT
    # separated: `not found` is other code than `notfound`
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens, an f-string as one, with its text: from Python 3.12 on its parts are tokens of their own."""
    lines = io.StringIO(text).readlines()
    begin, depth = (0, 0), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            begin = begin if depth else token.start
            depth += 1
        elif kind == "FSTRING_END":
            depth -= 1
        if depth == 0 and kind == "FSTRING_END":
            yield tokenize.TokenInfo(tokenize.STRING, _between(lines, begin, token.end), begin, token.end, token.line)
        elif depth == 0:
            yield token


def _between(lines: list[str], begin: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the text between two positions, each a row, counted from 1, and a column."""
    rows = lines[begin[0] - 1 : end[0]]
    rows[-1] = rows[-1][: end[1]]
    rows[0] = rows[0][begin[1] :]
    return "".join(rows)


@dataclass
class ScriptCheck:
    """Outcome for the files that a command names."""

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trainer: str | None = None
    """Trainer that the command has in them, and does not name."""


def check_script(script: str, words: Sequence[str] = ()) -> ScriptCheck:
    """Check the script and the modules beside it, none of which need be there. `words`: what follows on the command."""
    path, result, given = Path(script), ScriptCheck(), _given_trainer(words)
    # the modules too: a loss of the user's own stands in dataloader.py
    name = path.name.removesuffix(".py")
    own = [
        (module, file)
        for module in (name, *BESIDE.get(name, ()))
        for file in (path.with_name(f"{module}.py"), path.with_name(module) / "__init__.py")
        if file.is_file() and not _is_published(file, module)
    ]
    for module, file in own:
        code = read_code(file)
        if given is not None:
            _check_with_trainer(code, given, result)
        elif name == TRAINED and [file] == [each for _, each in own] and _is_trainer_alone(code):
            # the published finetune.py trains by this class, and all else is the published too
            result.trainer = f"{file}:{TRAINER}"
            result.notes.append(f"{code.text} in {file} is trained, as by --trainer {result.trainer}")
        else:
            result.faults.append(_fault(module, code, [read_code(each) for _, each in own]))
    return result


def _is_trainer_alone(code: ScriptCode) -> bool:
    return code.file.name == "dataloader.py" and [*code.trainers] == [TRAINER] and not code.others and not code.has_more


def _fault(module: str, code: ScriptCode, all_code: Sequence[ScriptCode]) -> str:
    published = f"this command does what the published {module}.py does. "
    fault = f"{code.file} has code of its own, which is not run here: {published}"
    if code.text:
        fault += f"It has {code.text}. "
    # the trainer may stand in another of the files
    remedies = [each.remedy for each in all_code if each.remedy]
    if len(remedies) == 1 and not code.others:
        return f"{fault}Give {remedies[0]} behind the command to train by that, or run it with torchrun"
    return (
        f"{fault}Write a changed loss as --loss FILE.py:FUNCTION (docs/guides/own_loss.md) and remove the file, or run "
        "it with torchrun"
    )


def _check_with_trainer(code: ScriptCode, given: str, result: ScriptCheck) -> None:
    """Add what a file trains by beside the trainer that is given: a fault; or a note that nothing else of it is run."""
    others = [text for name, text in code.trainers.items() if name != given.rpartition(":")[2]]
    if others or code.others:
        result.faults.append(
            f"{code.file} has {' and '.join([*others, *code.others])}, and --trainer names {given}, which alone is "
            "trained; remove what is not to count"
        )
    else:
        result.notes.append(
            f"{code.file} has code of its own, of which the loss of --trainer {given} alone is run: model, data and "
            "adapters follow from the flags and the YAML file"
        )


def _given_trainer(words: Sequence[str]) -> str | None:
    """Return what --trainer behind -- names."""
    given, rest = None, iter(dashed(cut(words)[1]))
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--trainer":
            given = value if equals else next(rest, None)
    return given


def _is_published(file: Path, module: str) -> bool:
    try:
        return digest(file.read_text(encoding="utf-8")) in PUBLISHED[module]
    except (UnicodeDecodeError, SyntaxError, tokenize.TokenError):
        return False
