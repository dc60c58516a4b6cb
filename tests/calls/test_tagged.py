"""Calls between tags, through a chat template that the package has no renderer for."""

import json
from pathlib import Path
from typing import Any

import pytest

from longrein.calls.conversation import Conversation, Message, Tool
from longrein.calls.rendering import Renderer, open_renderer
from longrein.config import ModelSection
from tests.calls import families

TOOL = Tool(
    "bash",
    "Runs a command.",
    {
        "type": "object",
        "properties": {
            "command": {"type": "string"},
            "seconds": {"type": "integer"},
            "where": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
)

# As Qwen3-Coder and GLM write a call.
FUNCTION = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
KEYS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}"
    "</tool_call>{% endfor %}"
)
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGS = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
FORMS = {"function": FUNCTION, "keys": KEYS}


def renderer_of(form: str, directory: Path) -> Renderer:
    template = TEMPLATE.replace("CALLS", FORMS[form])
    families.small_tokenizer(directory, ["<|im_start|>", "<|im_end|>", *TAGS], "<|im_end|>", template)
    return open_renderer(directory, ModelSection(path=str(directory), renderer="template"))


def written(form: str, arguments: dict[str, str]) -> str:
    if form == "function":
        inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function=bash>\n{inside}</function>\n</tool_call>"
    inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>bash\n{inside}</tool_call>"


def read(renderer: Renderer, says: str) -> Message:
    prompt = renderer.render(Conversation((Message("user", "Go."),), (TOOL,))).ids.tolist()
    return renderer.parse(renderer.encode(f"{says}<|im_end|>", begin=False).tolist(), prompt, (TOOL,))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("says", "means"),
    [
        ({"command": "ls -la"}, {"command": "ls -la"}),
        ({"command": "5"}, {"command": "5"}),
        ({"command": "true"}, {"command": "true"}),
        ({"command": '["a", 1]'}, {"command": '["a", 1]'}),
        ({"command": "a\n  b", "seconds": "5"}, {"command": "a\n  b", "seconds": 5}),
        ({"command": "ls", "where": "null"}, {"command": "ls", "where": None}),
        ({"command": "ls", "where": "at home"}, {"command": "ls", "where": "at home"}),
        ({"undeclared": "just so", "number": "7"}, {"undeclared": "just so", "number": 7}),
        ({}, {}),
    ],
)
def test_a_value_has_the_type_that_is_declared(
    form: str, says: dict[str, str], means: dict[str, Any], tmp_path: Path
) -> None:
    message = read(renderer_of(form, tmp_path), f"I look.\n{written(form, says)}")
    assert message.content == "I look."
    (call,) = message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("bash", means)
    assert message.broken_calls == 0


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_of_its_type_stays_text(form: str, tmp_path: Path) -> None:
    renderer = renderer_of(form, tmp_path)
    broken = written(form, {"command": "ls", "seconds": "a few"})
    message = read(renderer, broken)
    assert (message.content, message.tool_calls, message.broken_calls) == (broken, (), 1)
    cut = read(renderer, written(form, {"command": "ls"}).removesuffix("</tool_call>"))
    assert not cut.tool_calls and cut.broken_calls == 1
