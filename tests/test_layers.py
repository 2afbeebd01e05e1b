"""The package's layers: a module imports from its own and those below it, also lazily, and never in a circle."""

from __future__ import annotations

import pytest

from tests.layer_graph import LAYERS, MODULES, ORDER, PICTURE, drawn, graph, imports, layer

GRAPH = graph(for_types=True)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {""}))
def test_imports_point_down(module):
    up = [other for other in GRAPH[module] if ORDER.index(layer(other)) > ORDER.index(layer(module))]
    assert not up, f"{module} is of the layer {layer(module)} and must not import {', '.join(up)}"


def test_no_import_goes_in_a_circle():
    at_run_time, done = graph(for_types=False), set()

    def follow(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a circle of imports: {' → '.join((*above[above.index(module) :], module))}"
        if module not in done:
            for other in at_run_time[module]:
                follow(other, (*above, module))
            done.add(module)

    for module in sorted(set(MODULES) - {""}):
        follow(module, ())


def test_every_module_has_a_layer_and_the_test_sees_lazy_imports():
    assert {name.partition(".")[0] for name in MODULES} - {""} == {top for tops in LAYERS.values() for top in tops}
    lazy = "def f():\n    from undrift.tools import cli\n    import undrift.training.loop\n"
    assert imports(lazy, set(MODULES)) == {"tools.cli", "training.loop"}


def test_the_picture_in_the_documentation_is_of_these_layers():
    assert PICTURE.read_text(encoding="utf-8") == drawn(), "draw it again: python -m tests.layer_graph"
