"""A third adapter beside Flower's two APIs: the core on stacked arrays (clients x parameters), in plain NumPy.

This is what a vectorized engine stands on.
"""

from __future__ import annotations

from fedsel_flwr.rounds.core import Introduction, SelectionCore
from fedsel_flwr.rounds.replies import Reply
from tests.strategies import numpy_world as world


def play_stacked(core: SelectionCore, rounds: int) -> list[world.Array]:
    """Play rounds; returns the global model after each of them."""
    number = {f"node-{k}": k for k in range(world.FLEET)}  # connection -> client
    model, models = world.initial(), []
    for _ in range(rounds):
        core.enroll({node: Introduction(**world.facts(number[node])) for node in core.strangers(number)})
        if (question := core.question(number)) is not None:
            core.answer({node: world.probed(number[node], model) for node in question.nodes})
        core.received([model])
        chosen = core.choose(number)
        stack = world.train(model, world.np.array([number[node] for node in chosen], dtype=int))
        replies = {
            node: Reply(
                arrays=[stack[i]],
                num_examples=world.num_examples(number[node]),
                metrics=world.metrics(number[node], core.round),
            )
            for i, node in enumerate(chosen)
            if world.answers(number[node])
        }
        outcome = core.collect(replies, [model])
        after = None
        if outcome.enough:
            rows = [chosen.index(node) for node in outcome.kept]
            scheme = outcome.averaging
            weights = scheme.weights if scheme else [outcome.results[node].num_examples for node in outcome.kept]
            mean = world.np.average(stack[rows], axis=0, weights=weights)
            after = scheme.mix([model], [mean]) if scheme else [mean]
        core.finish(outcome, [model], after)
        model = model if after is None else after[0]
        models.append(model)
    return models
