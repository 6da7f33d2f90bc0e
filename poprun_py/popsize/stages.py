"""Which layers a device has: the stages of a pipeline."""

from dataclasses import dataclass
from functools import lru_cache

from popsize.model import Layer, Model


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """The layers of a stage: each with how often the stage has it."""

    index: int  # place in the pipeline, from 0
    layers: tuple[tuple[Layer, int], ...]  # layers and how many of each
    tied_parameters: float = 0.0  # parameters that two of its layers share

    def parameters_on_device(self, tensor: int) -> float:
        """Parameters of each device of a tensor group of ``tensor``."""
        return (
            sum(n * layer.parameters.on_device(tensor) for layer, n in self.layers) - self.tied_parameters / tensor
        )


@lru_cache(maxsize=512)
def stages_of(model: Model, pipeline: int) -> tuple[Stage, ...]:
    """The stages of ``model``, each with as many layers as the others; those in the middle have what is left over.

    What stands before and behind the repeated layers (embedding, logits) belongs to the first and the last stage.
    """
    block = model.block
    place = model.layers.index(block)
    each, left = divmod(block.count, pipeline)
    middle = range((pipeline - left) // 2, (pipeline - left) // 2 + left)
    stages = []
    for index in range(pipeline):
        layers = [(block, each + (index in middle))]
        if index == 0:
            layers = [*((layer, layer.count) for layer in model.layers[:place]), *layers]
        if index == pipeline - 1:
            layers = [*layers, *((layer, layer.count) for layer in model.layers[place + 1 :])]
        stages.append(Stage(index, tuple(layers), model.tied_parameters if pipeline == 1 else 0.0))
    return tuple(stages)


@lru_cache(maxsize=512)
def shown_stages(model: Model, pipeline: int) -> tuple[Stage, ...]:
    """Of stages that are alike, one: the first, the one with most layers of those between, and the last stage."""
    stages = stages_of(model, pipeline)
    between = stages[1:-1]
    fullest = max(between, key=lambda stage: sum(count for _, count in stage.layers), default=None)
    return tuple(dict.fromkeys(stage for stage in (stages[0], fullest, stages[-1]) if stage is not None))


@lru_cache(maxsize=512)
def most_parameters(model: Model, pipeline: int, tensor: int) -> float:
    """Parameters of each device of the stage that has most."""
    return max(stage.parameters_on_device(tensor) for stage in shown_stages(model, pipeline))


def most_phases(model: Model, pipeline: int, *, are_layers: bool) -> int:
    """The largest number of phases: as many as the stage that has most has layers, or parts of layers."""
    return max(
        sum(n * (1 if are_layers else len(layer.parts)) for layer, n in stage.layers)
        for stage in shown_stages(model, pipeline)
    )
