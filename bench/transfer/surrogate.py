"""Accuracy of a linear surrogate for a target's loss with a set of sources, on MovieLens users."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch import Tensor

from metaban.bench.core.report import Bar
from metaban.bench.transfer.affinity import averaged_affinity
from metaban.bench.transfer.plan import TransferPlan
from metaban.bench.transfer.tasks import rated_losses
from metaban.bench.worlds.data import DataMissing
from metaban.models.numerics.hardware import one_thread
from metaban.models.transfer.nets import NetLosses
from metaban.models.transfer.task_modeling import TransferSettings, draw_subsets, fit_surrogate

RANKS_LIMIT, SIGNS_LIMIT = 0.8, 0.8

SIZE: Final = TransferSettings().subset_size

TRAINED, BRIEF = "trained to the end", "trained briefly"


def measure_surrogate(plan: TransferPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """Rank correlation on held-out sets, and whether sets help or hurt, for all targets of all seeds.

    In networks trained to the end nearly all sets help, so predicting that is trivial. Whether sets help is therefore
    also measured with briefly trained networks, where some help and some hurt.
    """
    kinds = {TRAINED: plan.nets, BRIEF: replace(plan.nets, steps=plan.brief_steps)}
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for seed in plan.seeds:
        for number in range(plan.targets):
            console.print(f"surrogate, seed {seed}, target {number}", highlight=False)
            for kind, nets in kinds.items():
                try:
                    losses = rated_losses(seed, number, plan.sources, plan.data, nets)
                except DataMissing as missing:
                    console.print(f"skipped surrogate: {missing}", highlight=False, markup=False, soft_wrap=True)
                    return {"skipped": str(missing)}, []
                with one_thread():
                    rows[kind].append({"seed": seed, "target": number, **judged(losses, plan, seed)})
    means = {kind: _means(found) for kind, found in rows.items()}
    _print(means, console)
    if plan.plot is not None:
        _plot(rows[TRAINED], plan.plot)
    note, ranks = ", quick" if quick else "", means[TRAINED]["ranks"]
    bars = [
        Bar(f"surrogate: rank correlation on held-out sets{note}", ranks, ">=", RANKS_LIMIT),
        Bar(
            f"surrogate: rank correlation minus that of first order{note}",
            ranks - means[TRAINED]["ranks_first"],
            ">=",
            0.0,
        ),
        Bar(f"surrogate: helps or hurts, {BRIEF}, share correct{note}", means[BRIEF]["signs"], ">=", SIGNS_LIMIT),
    ]
    return {"means": means, "runs": rows}, bars


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}


def _print(means: dict[str, dict[str, float]], console: Console) -> None:
    table = Table("surrogate", "task modeling", "first order", "always the same", box=None, pad_edge=False)
    for kind, found in means.items():
        table.add_row(f"ranks, {kind}", f"{found['ranks']:.3f}", f"{found['ranks_first']:.3f}", "")
        signs = [found[name] for name in ("signs", "signs_first", "signs_constant")]
        table.add_row(f"helps or hurts, {kind}", *[f"{value:.1%}" for value in signs])
    console.print(table)


def judged(losses: NetLosses, plan: TransferPlan, seed: int) -> dict[str, Any]:
    """One target: a surrogate from 8k sets of one size and the empty set, and its accuracy on other sets."""
    settings, sources = TransferSettings(), losses.sources
    generator = torch.Generator().manual_seed(seed)
    no_source = torch.zeros(1, sources, dtype=torch.bool)  # [1, k]
    pairs = torch.eye(sources, dtype=torch.bool)  # [k, k]
    train = draw_subsets(sources, SIZE, settings.subsets_per_source * sources, generator)  # [n, k]
    same = draw_subsets(sources, SIZE, plan.judges, generator)  # [judges, k]
    small = torch.cat([draw_subsets(sources, size, plan.small_judges, generator) for size in range(1, SIZE)])
    values = losses.validation(torch.cat([no_source, train, pairs, same, small]))  # [all]
    sizes = [1, len(train), len(pairs), len(same), len(small)]
    alone, of_train, of_pairs, of_same, of_small = torch.split(values, sizes)
    surrogate = fit_surrogate(torch.cat([no_source, train]), torch.cat([alone, of_train]), settings)
    affinity = alone - of_pairs  # [k]
    helps = of_small < alone  # [small]
    foretold = surrogate.predict(same)  # [judges]
    share = float(helps.double().mean())
    return {
        "ranks": _ranks(foretold, of_same),
        "ranks_first": _ranks(-averaged_affinity(affinity, same), of_same),
        "signs": _right(surrogate.predict(small) < alone, helps),
        "signs_first": _right(averaged_affinity(affinity, small) > 0, helps),
        "signs_constant": max(share, 1 - share),
        "helps": share,
        "alone": float(alone),
        "variance": surrogate.variance,
        "held_out_error": surrogate.held_out_error,
        "residual": surrogate.residual,
        "foretold": foretold.tolist(),
        "measured": of_same.tolist(),
    }


def _ranks(foretold: Tensor, measured: Tensor) -> float:
    return float(spearmanr(foretold.numpy(), measured.numpy()).statistic)


def _right(foretold: Tensor, truth: Tensor) -> float:
    return float((foretold == truth).double().mean())


def _plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """g(S) against f_t(S) on held-out sets, for some targets."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    shown = rows[:4]
    figure = Figure(figsize=(3.4 * len(shown), 3.4), layout="constrained")
    for axes, row in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.plot(row["foretold"], row["measured"], "o", ms=3, alpha=0.6)
        axes.axline((row["foretold"][0], row["foretold"][0]), slope=1, color="black", lw=0.8)
        title = f"seed {row['seed']}, target {row['target']}: {row['ranks']:.2f}"
        axes.set(title=title, xlabel="g(S)", ylabel="f(S)")
        axes.grid(alpha=0.3)
    figure.savefig(folder / "transfer-surrogate.png", dpi=150)
