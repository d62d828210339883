"""Train the example adapters on the demo model with PEFT, or ask the ones that are there.

    python examples/train_adapters.py [--output DIR] [--only NAME]
    python examples/train_adapters.py --evaluate

`pirate-v1` and `pirate-v2` are two versions of one behaviour; `json` is another behaviour with
another rank, other targets and only some of the layers. All three take a few minutes on
two cores.
"""

from __future__ import annotations

import importlib.util
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from demo_model import HUB_ID, ensure_demo_model
from evaluate_adapters import as_table, evaluate, load_base, prompt_ids

from loractl.output import console, reported
from lorad.errors import LoradError

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from torch import Tensor

HERE = Path(__file__).resolve().parent
WEIGHTS = "adapter_model.safetensors"
SEED = 0
BATCH = 4
IGNORED = -100  # a label that the loss leaves out: the prompt and the padding

ATTENTION = ("q_proj", "v_proj")
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained; its data are in `data/{name}.jsonl`."""

    name: str
    says: str  # for people: what its answers look like
    rank: int
    alpha: int
    targets: tuple[str, ...]
    first_layer: int  # layers below stay as they are
    epochs: int
    learning_rate: float


RECIPES = (
    Recipe("pirate-v1", 'answers like a pirate: "Arr, ..."', 8, 16, ATTENTION, 0, 4, 2e-3),
    Recipe("pirate-v2", 'a pirate who signs: "Ahoy! ..."', 8, 16, ATTENTION, 0, 4, 2e-3),
    Recipe("json", "answers with one JSON object only", 16, 32, ALL_LINEAR, 20, 4, 1e-3),
)


@dataclass(frozen=True)
class Example:
    """One conversation as token ids; the loss is taken from `answer_start` on."""

    ids: list[int]
    answer_start: int


# --- data -------------------------------------------------------------------------------------


def load_pairs(path: Path) -> list[dict[str, str]]:
    """The lines of a data file: `{"question": ..., "answer": ...}`."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def encode(tokenizer: Any, pair: dict[str, str]) -> Example:
    prompt = prompt_ids(tokenizer, pair["question"])
    answer = [*tokenizer.encode(pair["answer"]), tokenizer.eos_token_id]
    return Example(prompt + answer, len(prompt))


def batches(examples: list[Example], shuffle: random.Random) -> list[list[Example]]:
    """Examples of like length together, so that little is padded; the batches in random order."""
    shuffled = shuffle.sample(examples, len(examples))
    ordered = sorted(shuffled, key=lambda example: len(example.ids))
    groups = [ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH)]
    shuffle.shuffle(groups)
    return groups


def pad(batch: list[Example]) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both `[batch, length]`.

    Padded on the right, where causal attention hides the padding from every real token; so no
    attention mask is needed.
    """
    import torch

    length = max(len(example.ids) for example in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    for row, example in enumerate(batch):
        tokens = torch.tensor(example.ids)
        ids[row, : len(tokens)] = tokens
        labels[row, example.answer_start : len(tokens)] = tokens[example.answer_start :]
    return ids, labels


# --- training ---------------------------------------------------------------------------------


def lora_config(recipe: Recipe, layers: int) -> LoraConfig:
    from peft import LoraConfig

    some = recipe.first_layer > 0
    return LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        layers_to_transform=list(range(recipe.first_layer, layers)) if some else None,
        layers_pattern="layers" if some else None,
        task_type="CAUSAL_LM",
    )


def answer_loss(model: PeftModel, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the answers' tokens; the vocabulary's matmul runs for those alone."""
    from torch.nn.functional import cross_entropy

    causal_lm: Any = model.get_base_model()
    hidden = causal_lm.model(ids, use_cache=False).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    wanted = targets != IGNORED
    return cross_entropy(causal_lm.lm_head(hidden[wanted]), targets[wanted])


def train(recipe: Recipe, directory: Path) -> PeftModel:
    """Train one adapter in float32 on the model in `directory`."""
    import torch
    from peft import get_peft_model
    from transformers import AutoTokenizer

    torch.manual_seed(SEED)
    base = load_base(directory, torch.float32)
    model = get_peft_model(base, lora_config(recipe, base.config.num_hidden_layers))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    pairs = load_pairs(HERE / "data" / f"{recipe.name}.jsonl")
    examples = [encode(tokenizer, pair) for pair in pairs]
    shuffle = random.Random(SEED)
    fit(model, recipe, [step for _ in range(recipe.epochs) for step in batches(examples, shuffle)])
    return model


def fit(model: PeftModel, recipe: Recipe, steps: list[list[Example]]) -> None:
    """One optimizer step for each batch; a bar on stderr shows the loss."""
    import torch
    from rich.console import Console
    from rich.progress import Progress

    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=len(steps), pct_start=0.1
    )
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(recipe.name, total=len(steps))
        for batch in steps:
            loss = answer_loss(model, *pad(batch))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            description = f"{recipe.name}, loss {loss.item():.2f}"
            progress.update(task, advance=1, description=description)


# --- saving -----------------------------------------------------------------------------------


def save(model: PeftModel, recipe: Recipe, directory: Path) -> None:
    """adapter_config.json as PEFT writes it, bfloat16 safetensors, and a short README."""
    import torch
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"]
    config.inference_mode = True
    config.base_model_name_or_path = HUB_ID  # PEFT has put the local directory there
    config.save_pretrained(str(directory))
    _sort_targets(directory / "adapter_config.json")
    # The adapter alone; else PEFT would ask the hub whether the vocabulary has changed.
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    weights = directory / WEIGHTS
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    (directory / "README.md").write_text(readme(recipe), "utf-8")


def _sort_targets(path: Path) -> None:
    """PEFT keeps the targets in a set, whose order differs from run to run."""
    config = json.loads(path.read_text("utf-8"))
    config["target_modules"].sort()
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def readme(recipe: Recipe) -> str:
    where = f" of layers {recipe.first_layer} and up" if recipe.first_layer else ""
    return (
        f"# {recipe.name}\n\n"
        f"LoRA adapter for {HUB_ID}: {recipe.says}.\n"
        f"Rank {recipe.rank}, alpha {recipe.alpha}, on {', '.join(recipe.targets)}{where}.\n"
        f"Made by `python examples/train_adapters.py --only {recipe.name}` "
        f"from `examples/data/{recipe.name}.jsonl`.\n"
    )


# --- command line -----------------------------------------------------------------------------


def selected(only: str | None) -> list[Recipe]:
    found = [recipe for recipe in RECIPES if only in (None, recipe.name)]
    if not found:
        names = ", ".join(recipe.name for recipe in RECIPES)
        hint = f"use one of {names}"
        raise LoradError("usage.invalid", f"there is no example adapter {only!r}", hint=hint)
    return found


def check_trained(recipes: list[Recipe], output: Path) -> None:
    for recipe in recipes:
        weights = output / recipe.name / WEIGHTS
        if not weights.is_file():
            hint = f"python examples/train_adapters.py --only {recipe.name}"
            raise LoradError("path.not_found", f"there is no {weights}", hint=hint)


def check_installed() -> None:
    if not all(importlib.util.find_spec(package) for package in ("peft", "transformers")):
        raise LoradError(
            "usage.invalid",
            "the Python packages peft and transformers train the adapters",
            hint='pip install "lorad[demo]"',
        )


def main(
    output: Annotated[Path, typer.Option(help="Directory of the adapters.")] = HERE / "adapters",
    only: Annotated[str | None, typer.Option(help="One adapter instead of all.")] = None,
    evaluation: Annotated[
        bool, typer.Option("--evaluate", help="Train nothing; ask the adapters and check them.")
    ] = False,
) -> None:
    """Train the example adapters, or check those that are there (exit code 1: one is off)."""
    with reported():
        check_installed()
        recipes = selected(only)
        if evaluation:
            check_trained(recipes, output)
        directory = ensure_demo_model()
    if evaluation:
        answers = list(evaluate(directory, output, [recipe.name for recipe in recipes]))
        console().print(as_table(answers))
        raise typer.Exit(0 if all(answer.good for answer in answers) else 1)
    for recipe in recipes:
        save(train(recipe, directory), recipe, output / recipe.name)
        typer.echo(output / recipe.name)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
