"""The device of the tests of verbs is a provider like the others."""

import inspect

from fake_device import FakeProvider
from gpunetio.providers.provider import Provider


def test_fake_has_the_provider_interface():
    for name, method in inspect.getmembers(Provider, inspect.isfunction):
        if not name.startswith("_"):
            expected, actual = inspect.signature(method), inspect.signature(getattr(FakeProvider, name))
            assert list(actual.parameters) == list(expected.parameters), name
