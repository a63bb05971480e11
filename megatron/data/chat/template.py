"""Chat templates: lookup, reading and rendering.

A template is Jinja text in the dialect of Hugging Face's tokenizers that turns a list of messages into one string. It
is untrusted: it runs in Jinja's sandbox, and a .py file is parsed and never run.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.data.chat.template_presets import PRESETS
from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.base import CONFIG_NAME, read_config

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})

TEMPLATE_NAME = "chat_template.jinja"
TOOL_TEMPLATE_NAME = "additional_chat_templates/tool_use.jinja"

# the fields of InstructLab's SpecialTokens that also have a name in tokenizer_config.json
_NAMES_OF_FIELDS = {"bos": "bos_token", "eos": "eos_token", "pad": "pad_token"}

_BAR = "[|\uff5c]"  # DeepSeek writes the full-width bar
MARKER = re.compile(rf"<{_BAR}[^\s<>|\uff5c'\"{{}}]+{_BAR}>|<(?:start|end)_of_\w+>")
"""Text that is a single token wherever a template writes it. One that the template puts together, such as
<|{{role}}|>, is not known before it is rendered."""

GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
"""Tag around the text that the model writes."""
GENERATION_MARKS = "\ufdd0\ufdd1"
"""Written before and after such text by `ChatTemplate.render(marks_generation=True)`. They are not characters."""

REFUSED, LEFT_OUT, UNCLEAR = "refused by the template", "left out by the template", "turn not identified"
"""Kinds of a TemplateFailure."""


class TemplateFailure(DataError):
    """A template refuses these messages, leaves a part of them out, or hides where the model writes.

    `kind` is the name under which it is counted.
    """

    def __init__(self, reason: str, kind: str = REFUSED):
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class TemplateSource:
    """Text of a template, and the tokens that its file names."""

    text: str
    origin: str
    """Path, or `preset chatml`, for messages."""
    named_tokens: dict[str, str] = field(default_factory=dict)
    """bos_token, eos_token and pad_token of the template's file."""
    added_tokens: tuple[str, ...] = ()
    """Tokens to add to the tokenizer, by the template's file."""
    tool_use: str | None = None
    """Text of the tokenizer's template for conversations with tools, if it has another for them."""

    def tokens_to_add(self) -> tuple[str, ...]:
        """Return the tokens that a tokenizer needs: those that the file names, else the markers in the template."""
        if self.added_tokens:
            return self.added_tokens
        # in the order of the text, each once: ids of added tokens follow it
        return tuple(dict.fromkeys(marker[0] for marker in MARKER.finditer(self.all_text)))

    @property
    def all_text(self) -> str:
        return self.text + (self.tool_use or "")

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.all_text.encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Finding


def find_template(name: str | None, tokenizer_folder: Path) -> TemplateSource:
    """Return a preset, the template of a .jinja or .py file, or, for None, the tokenizer's. Raises DataError."""
    if name is None:
        return _tokenizers_own(tokenizer_folder)
    if name in PRESETS:
        preset = PRESETS[name]
        return TemplateSource(preset.template, f"preset {name}", added_tokens=preset.special_tokens)
    path = Path(name)
    if path.suffix == ".py":
        return _from_python(path)
    # by its ending even if it is missing, for a message about a file instead of a preset
    if path.suffix in (".jinja", ".jinja2", ".j2") or path.is_file():
        return TemplateSource(_read(path), str(path))
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise DataError(
        f"chat template {name!r} is neither a file nor a preset; {hint}the presets are {', '.join(PRESETS)}, and files "
        "end in .jinja or .py"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"chat template {path} cannot be read: {error.strerror}; give a file that exists") from None
    except UnicodeDecodeError as error:
        raise DataError(f"chat template {path} is not UTF-8 at byte {error.start}; convert the file") from None


def _is_named(entry: object) -> bool:
    """Return True for an entry of a list of chat templates: {"name": ..., "template": ...}."""
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _tokenizers_own(folder: Path) -> TemplateSource:
    """Return the template that transformers takes: that of a file, else that of the config. Raises DataError."""
    # newer releases of transformers write files; before, the config held the text, or a list of named ones
    file, for_tools = folder / TEMPLATE_NAME, folder / TOOL_TEMPLATE_NAME
    tool_use = _read(for_tools) if for_tools.is_file() else None
    if file.is_file():
        return TemplateSource(_read(file), str(file), tool_use=tool_use)
    template = read_config(folder).get("chat_template")
    if isinstance(template, list):
        templates = {entry["name"]: entry["template"] for entry in template if _is_named(entry)}
        if "default" not in templates:
            raise DataError(
                f"{folder / CONFIG_NAME} has the chat templates {', '.join(templates) or 'none'}, and none is named "
                "default; write the one you want to a .jinja file and give it with --chat-template"
            )
        template = templates["default"]
        tool_use = tool_use or templates.get("tool_use")
    if not isinstance(template, str):
        raise DataError(
            f"the tokenizer in {folder} has no chat template, neither {TEMPLATE_NAME} nor chat_template in "
            f"{CONFIG_NAME}; give a chat template: a .jinja or .py file, or a preset ({', '.join(PRESETS)})"
        )
    return TemplateSource(template, str(folder / CONFIG_NAME), tool_use=tool_use)


# ---------------------------------------------------------------------------------------------------------------------
# .py files


def _from_python(path: Path) -> TemplateSource:
    """Read CHAT_TEMPLATE and SPECIAL_TOKENS, in InstructLab's form. Only literals are accepted."""
    text = _read(path)
    try:
        # parsed, never imported: the file comes with a model, and importing it would run its code
        tree = ast.parse(text, str(path))
    except (SyntaxError, ValueError) as error:
        raise DataError(f"chat template {path} is not Python: {error}; correct the file") from None
    file = _PythonFile(path, dict(_assignments(tree)))
    if "CHAT_TEMPLATE" not in file.values:
        raise DataError(f"{path} sets no CHAT_TEMPLATE; assign it a string")
    text = file.string(file.values["CHAT_TEMPLATE"])
    named: dict[str, str] = {}
    added: dict[str, None] = {}
    for name, token, is_added in file.special_tokens():
        if not token:
            continue
        if name in _NAMES_OF_FIELDS:
            named[_NAMES_OF_FIELDS[name]] = token
        # the tokenizer has to know BOS, EOS and PAD whatever add_to_tokenizer says
        if is_added or name in _NAMES_OF_FIELDS:
            added[token] = None
    return TemplateSource(text, str(path), named, tuple(added))


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a file sets, and their values."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        # of `a, b = ...` and `a.b = ...` nothing is needed here
        if isinstance(target, ast.Name):
            yield target.id, value


@dataclass(frozen=True)
class _PythonFile:
    """A file that is read and never run."""

    path: Path
    values: Mapping[str, ast.expr]
    """Expressions by the names that they are assigned to."""

    def string(self, node: ast.expr) -> str:
        """Return the value of a literal, of a sum of them, or of a name of one. Raises DataError for all else."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.string(node.left) + self.string(node.right)
        if isinstance(node, ast.Name) and self.values.get(node.id, node) is not node:
            # without the name, which its own value may not use
            others = {name: value for name, value in self.values.items() if name != node.id}
            return _PythonFile(self.path, others).string(self.values[node.id])
        raise DataError(
            f"{self.path}:{node.lineno}: `{ast.unparse(node)[:60]}` is not a literal string; the file is read, not "
            "run: write the text itself"
        )

    def special_tokens(self) -> list[tuple[str, str, bool]]:
        """Return (field, token, is_added) of SPECIAL_TOKENS, `SpecialTokens(eos=TokenInfo("</s>"))` or a dict."""
        node = self.values.get("SPECIAL_TOKENS")
        if node is None:
            return []
        if isinstance(node, ast.Dict):
            items = zip(node.keys, node.values, strict=True)
            pairs = [(self.string(key), value) for key, value in items if key]
        elif isinstance(node, ast.Call) and not node.args:
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg]
        else:
            raise DataError(
                f"{self.path}:{node.lineno}: SPECIAL_TOKENS must be SpecialTokens(eos=TokenInfo(...), ...) or a dict "
                "of strings"
            )
        return [(name, *self._token(value)) for name, value in pairs]

    def _token(self, value: ast.expr) -> tuple[str, bool]:
        """Return the token of a string or of `TokenInfo("</s>", add_to_tokenizer=True)`, and whether to add it."""
        if not isinstance(value, ast.Call):
            return self.string(value), True
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        # by place as by name, in the order of InstructLab's TokenInfo
        given |= dict(zip(("token", "add_to_tokenizer"), value.args, strict=False))
        flag = given.get("add_to_tokenizer")
        is_added = isinstance(flag, ast.Constant) and flag.value is True
        token = given.get("token")
        return self.string(token) if token is not None else "", is_added


# ---------------------------------------------------------------------------------------------------------------------
# Rendering


def _environment(marks_generation: bool = False) -> jinja2.Environment:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}`, which holds the model's text, written with marks or without."""

        tags = {"generation"}  # noqa: RUF012  an attribute of Jinja's

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if not marks_generation:
                # a scope of its own, as a call block is: both must write the same
                return nodes.Scope(body, lineno=line)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body, lineno=line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return GENERATION_MARKS[0] + caller() + GENERATION_MARKS[1]

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    # transformers' one: that of Jinja escapes <, >, & and ' for HTML
    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    # the options and extensions of transformers, for which templates are written
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


class ChatTemplate:
    """A compiled template. Raises DataError if it is not valid Jinja."""

    def __init__(self, source: TemplateSource, tokens: Mapping[str, str]):
        """`tokens`: texts of bos_token, eos_token, ... A missing name is empty text."""
        from jinja2 import TemplateError, meta

        self.source = source
        environment = _environment()
        try:
            self._template = environment.from_string(source.text)
            # by the syntax tree, which sees names in branches that no render has taken
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source.text)))
            """Names that the template uses."""
            self.marks_generation = GENERATION.search(source.text) is not None
            """The template marks the model's text."""
            self._marking = _environment(True).from_string(source.text) if self.marks_generation else self._template
        except TemplateError as error:
            line = getattr(error, "lineno", None)  # not every one has it
            where = f"{source.origin}:{line}" if line else source.origin
            raise DataError(f"chat template {where} is not Jinja: {error}; correct the template") from None
        # Jinja writes an undefined name as nothing, but a sum with one fails
        self._variables: dict[str, Any] = {**self._template.globals, "bos_token": "", "eos_token": "", **tokens}
        # transformers passes these always, so templates check whether they are none, not whether they are defined
        self._variables |= {"tools": None, "documents": None}
        # each render gets the globals among its variables; Jinja would go through them once more, for imports
        self._template.globals = self._marking.globals = {}
        self.bos_token: str = self._variables["bos_token"]
        eos = self._variables["eos_token"]
        self.end_marker = re.compile(f"{MARKER.pattern}|{re.escape(eos)}") if eos else MARKER
        """Special tokens that may end a turn."""

    def failure(self, what: str, kind: str) -> TemplateFailure:
        """Return an error of this template: `what` it does, and the remedy."""
        return TemplateFailure(f"chat template {self.source.origin} {what}", kind)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] = NO_VARIABLES,
        marks_generation: bool = False,
    ) -> str:
        """Return the text of a conversation. Raises TemplateFailure.

        `variables`: tools, documents and others. `marks_generation`: write GENERATION_MARKS where it has such marks.
        """
        # two compilations: marks are not characters, but a filter such as trim or length would see them
        template = self._marking if marks_generation else self._template
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            # as `render` does, without rebuilding the same globals each time
            context = template.new_context({**self._variables, **variables, **given}, shared=True)
            return "".join(template.root_render_func(context))
        except RecursionError:
            raise TemplateFailure(f"chat template {self.source.origin} calls itself without end") from None
        except Exception as error:  # of the template's expressions: TemplateError, TypeError, KeyError, ...
            raise TemplateFailure(
                f"chat template {self.source.origin} does not take this conversation: {error}"
            ) from None
