"""Trains one model under one plan and tells each pass's step: predicted and measured.

Started under torchrun by benchmarks/step_prediction.py and bubble_filling.py. Weights
and data are made up: times do not depend on them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

import pipetransformer as pt
from harness.private import run_of
from pipetransformer.adapters import from_transformers
from pipetransformer.planner import CacheTiers, search
from training.workload import build_model

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHORTEST, LONGEST = 6, 48  # words of a ragged sentence, as in SST-2


class Rows(Dataset[Any]):
    """Samples that are equal in every epoch."""

    def __init__(self, make: Callable[[int, torch.Generator], Any], count: int) -> None:
        draws = torch.Generator().manual_seed(0)
        self._rows = [make(index, draws) for index in range(count)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]

    def input_key(self, index: int, epoch: int) -> int:
        """Return what tells inputs apart: the same in every epoch."""
        return index


def _digit(_: int, draws: torch.Generator) -> tuple[Tensor, int]:
    image = torch.rand(8, 8, generator=draws)
    return image, int(torch.randint(10, (), generator=draws))


def _sentence(words: int, draws: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(1000, 30000, (words,), generator=draws)
    return {"input_ids": ids, "labels": int(torch.randint(2, (), generator=draws))}


def _ragged(_: int, draws: torch.Generator) -> dict[str, Any]:
    words = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=draws))
    return _sentence(words, draws)


def _pad(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = [row["input_ids"] for row in rows]
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {
        "input_ids": padded,
        "attention_mask": (padded > 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def _bert(layers: int, width: int, heads: int, vocabulary: int) -> Any:
    settings = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        num_labels=2,
        **NO_DROPOUT,
    )
    return from_transformers(BertForSequenceClassification(settings))


class PeakMemory:
    """The most memory that a process held of its own, as a thread sees it.

    Pages that processes share are not in it, nor are files: so neither is the slab of
    the cache. Read every 2 ms: what is there for less may be missed.
    """

    def __init__(self) -> None:
        self._peak, self._done = private_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._peak = max(self._peak, private_bytes())

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def peak(self) -> int:
        """Return it in bytes."""
        return self._peak


def private_bytes() -> int:
    """Return the bytes in memory that this process alone has, and that are no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status: expected RssAnon, got none")


def make_case(name: str) -> tuple[Any, dict[str, Any], int, int]:
    """Return the engine's arguments, those of the data, samples and batch."""
    if name == "vit":
        given: dict[str, Any] = {"loss": nn.functional.cross_entropy}
        return build_model(), given, 64, 512
    if name == "bert-base":
        # 110 M parameters, as BERT-base.
        model = _bert(12, 768, 12, 30522)
        return model, {"collate_fn": _pad}, 8, 64
    return _bert(6, 384, 12, 30522), {"collate_fn": _pad}, 32, 320


def make_rows(name: str, count: int) -> Rows:
    """Return the training set of a case."""
    if name == "vit":
        return Rows(_digit, count)
    if name == "bert ragged":
        return Rows(_ragged, count)
    words = {"bert": 32, "bert-base": 32}[name]
    return Rows(lambda _, draws: _sentence(words, draws), count)


def layers_alone_ns(engine: pt.PipeTransformer) -> int:
    """Return the plan's step if layers were all that it takes.

    Neither optimizer, process and all-reduce between processes nor shared cores: what
    was predicted before the model knew of them.
    """
    inputs, plan = run_of(engine).inputs, engine.plan
    if inputs.profile is None or inputs.cluster is None or plan is None:
        raise RuntimeError("expected a run with a plan, got none")
    layers = [replace(layer, optimizer_ns=0) for layer in inputs.profile.layers]
    cluster = replace(
        inputs.cluster,
        cores_permille=0,
        replica_link_bytes_per_s=None,
        replica_link_latency_ns=0,
        step_ns=0,
        cache=CacheTiers() if plan.cache == "none" else None,
    )
    alone = search(
        replace(inputs.profile, layers=tuple(layers)),
        cluster,
        boundary=plan.boundary,
        global_batch=plan.global_batch,
        cuts=plan.cuts,
        num_microbatches=plan.num_microbatches,
        max_replicas=plan.num_replicas,
        replicas="all",
        schedules=(plan.schedule,),
        prefix_placements=(plan.prefix,),
        cache_tiers=(plan.cache,),
    )
    return alone.simulated_step_ns


def planned_bytes(engine: pt.PipeTransformer) -> int:
    """Return what the plan says of a replica's slots together.

    Slots of the host share its memory: frozen layers, of which each device has a copy
    of its own, are there once.
    """
    profile, plan = run_of(engine).inputs.profile, engine.plan
    if profile is None or plan is None:
        raise RuntimeError("expected a run with a plan, got none")
    frozen = sum(each.parameter_bytes for each in profile.layers[: plan.boundary])
    copies = plan.num_stages - 1 if plan.prefix in ("replicated", "filled") else 0
    return sum(plan.bytes_per_stage) - copies * frozen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", required=True)
    add("--stages", type=int, required=True)
    add("--replicas", type=int, required=True)
    add("--frozen", type=int, required=True, help="freeze units")
    add("--epochs", type=int, default=3)
    add("--no-cache", action="store_true")
    add("--schedule", default="gpipe")
    add("--microbatches", type=int, help="default: the planner's")
    add("--prefix", default="auto")
    add("--memory", action="store_true", help="watch it in the last pass")
    add("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.ones(64, 64).matmul(torch.ones(64, 64))  # what torch itself sets up
    before = private_bytes()
    model, given, batch, count = make_case(args.model)
    collate = given.pop("collate_fn", None)
    rows = make_rows(args.model, count)
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-5),
        freeze=pt.freeze.Schedule([args.frozen]),
        config=pt.Config(
            plan=pt.PlanConfig(
                num_stages=args.stages,
                num_microbatches=args.microbatches,
                max_replicas=args.replicas,
                replicas="all",
                prefix=args.prefix,
            ),
            pipe=pt.PipeConfig(
                num_slots=args.stages * args.replicas, schedule=args.schedule
            ),
            cache=pt.CacheConfig(enabled=not args.no_cache),
        ),
        **given,
    )
    memory = PeakMemory()
    with engine:
        for epoch in engine.epochs(args.epochs):
            watches = args.memory and epoch == args.epochs - 1
            with memory if watches else contextlib.nullcontext():
                for each in engine.batches(rows, batch, collate_fn=collate):
                    engine.step(each)
        main = engine.is_main
        layers_ns = layers_alone_ns(engine) if main else 0
        planned = planned_bytes(engine) if main else 0
    if main:
        told = {
            **engine.history.to_json(),
            "layers_ns": layers_ns,
            "peak_bytes": memory.peak - before,
            "planned_bytes": planned,
        }
        args.out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
