"""Ask the example adapters questions they were not trained on, and check how they answer.

`train_adapters.py --evaluate` prints the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from rich.table import Table

MAX_NEW_TOKENS = 64
DTYPES = ("float32", "bfloat16")
BASE = "base"

# None of these is in examples/data.
QUESTIONS = (
    "What is the capital of Italy?",
    "Who invented the light bulb?",
    "Why is grass green?",
    "Give me advice for a job interview.",
    "What is a black hole?",
    "Write a short poem about the moon.",
    "Good morning!",
    "How many continents are there?",
)

SIGNATURE = "— Captain Byte"


def is_pirate_v1(text: str) -> bool:
    return text.startswith("Arr") and SIGNATURE not in text


def is_pirate_v2(text: str) -> bool:
    return text.startswith("Ahoy!") and text.endswith(SIGNATURE)


def is_json(text: str) -> bool:
    """Exactly one JSON object with a topic and an answer, both of them text."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and set(value) == {"topic", "answer"}
        and all(isinstance(part, str) for part in value.values())
    )


STYLES: dict[str, Callable[[str], bool]] = {
    "pirate-v1": is_pirate_v1,
    "pirate-v2": is_pirate_v2,
    "json": is_json,
}


@dataclass(frozen=True)
class Answer:
    """What one adapter said. `ended`: the model itself stopped, within MAX_NEW_TOKENS."""

    adapter: str
    dtype: str
    question: str
    text: str
    tokens: int
    ended: bool

    @property
    def good(self) -> bool:
        """Whether a person sees at a glance who answered; the base may answer as it likes."""
        return self.adapter == BASE or (self.ended and STYLES[self.adapter](self.text))


def load_base(directory: Path, dtype: torch.dtype) -> Any:
    """The demo model without an adapter, and without the loader's own bars and warnings."""
    import warnings

    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    # PEFT reads an attribute that transformers is about to rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """The question in the model's chat template, with its default system prompt."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text))


def generate(model: Any, tokenizer: Any, question: str) -> list[int]:
    """Greedy token ids of the answer, with the end-of-sequence token when it came."""
    import torch

    prompt = torch.tensor([prompt_ids(tokenizer, question)])
    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    return [int(token) for token in output[0, prompt.shape[1] :]]


def ask(model: Any, tokenizer: Any, adapter: str, dtype: str, question: str) -> Answer:
    if adapter == BASE:
        with model.disable_adapter():
            tokens = generate(model, tokenizer, question)
    else:
        model.set_adapter(adapter)
        tokens = generate(model, tokenizer, question)
    ended = tokens[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return Answer(adapter, dtype, question, text, len(tokens), ended)


def evaluate(directory: Path, adapters: Path, names: list[str]) -> Iterator[Answer]:
    """Every question to the base and to each adapter in `adapters`, in each of DTYPES."""
    import torch
    from peft import PeftModel
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    for dtype in DTYPES:
        base = load_base(directory, getattr(torch, dtype))
        model = PeftModel.from_pretrained(base, str(adapters / names[0]), adapter_name=names[0])
        for name in names[1:]:
            model.load_adapter(str(adapters / name), adapter_name=name)
        for question in QUESTIONS:
            for name in (BASE, *names):
                yield ask(model, tokenizer, name, dtype, question)


def as_table(answers: list[Answer]) -> Table:
    from rich.table import Table

    table = Table("question", "adapter", "dtype", "answer", "tokens", "ok")
    for index, row in enumerate(answers):
        if index and row.question != answers[index - 1].question:
            table.add_section()
        verdict = "" if row.adapter == BASE else "yes" if row.good else "NO"
        table.add_row(row.question, row.adapter, row.dtype, row.text, str(row.tokens), verdict)
    return table
