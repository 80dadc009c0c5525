"""Our declarations of rdma-core against the real thing: Debian's headers, compiled, and its libraries' symbols."""

import ctypes
import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpunetio.errors import NotSupportedError
from gpunetio.providers.mlx5 import libraries, structs
from rdma_core import skip_without_headers, skip_without_libraries, skip_without_readelf
from stand_in.building import compiler

# Constants that the headers of rdma-core 44 do not name yet, and who does.
NEWER = {"MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED"}
UNIONS = {"ibv_gid"}
# Newer headers append members to these. A library writes those only if the caller asks for them or has room for them.
EXTENDED = {"ibv_port_attr", "mlx5dv_context"}


def declared_structures() -> list[type[ctypes.Structure] | type[ctypes.Union]]:
    return [
        kind
        for name, kind in vars(structs).items()
        if inspect.isclass(kind) and issubclass(kind, (ctypes.Structure, ctypes.Union))
        if kind.__module__ == structs.__name__ and not name.startswith("_")
    ]


def declared_constants() -> dict[str, int]:
    return {name: value for name, value in vars(structs).items() if re.fullmatch(r"(IBV|MLX5DV)_\w+", name)}


def members(kind: type[ctypes.Structure] | type[ctypes.Union], prefix: str = "", base: int = 0) -> Iterator[tuple]:
    """Path, offset and size of each member, and of the members of nested structures."""
    for name, inner, *_ in kind._fields_:
        at, size = base + getattr(kind, name).offset, getattr(kind, name).size
        yield prefix + name, at, size
        if issubclass(inner, (ctypes.Structure, ctypes.Union)):
            yield from members(inner, f"{prefix}{name}.", at)


@pytest.fixture(scope="module")
def header_says(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Sizes, offsets and values as the C compiler has them."""
    skip_without_headers()
    lines = []
    for kind in declared_structures():
        name = kind.__name__
        tag = f"{'union' if name in UNIONS else 'struct'} {name}"
        lines.append(f'P("{name}", sizeof({tag}));')
        for path, _, _ in members(kind):
            lines.append(f'P("{name}.{path}", offsetof({tag}, {path}));')
            lines.append(f'P("sizeof {name}.{path}", sizeof((({tag} *)0)->{path}));')
    lines += [f'P("{name}", {name});' for name in declared_constants() if name not in NEWER]
    folder = tmp_path_factory.mktemp("headers")
    source, program = folder / "headers.c", folder / "headers"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/mlx5dv.h>\n"
        '#define P(name, value) printf("%s=%llu\\n", name, (unsigned long long)(value))\n'
        "int main(void)\n{\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    subprocess.run([compiler() or "cc", "-Wno-deprecated-declarations", source, "-o", program], check=True, timeout=60)
    answer = subprocess.run([program], check=True, capture_output=True, text=True, timeout=10).stdout
    return {name: int(value) for name, _, value in (line.rpartition("=") for line in answer.splitlines())}


@pytest.mark.parametrize("kind", declared_structures(), ids=lambda kind: kind.__name__)
def test_structures_are_the_headers(kind, header_says):
    name = kind.__name__
    ours = {name: ctypes.sizeof(kind)}
    for path, offset, size in members(kind):
        ours |= {f"{name}.{path}": offset, f"sizeof {name}.{path}": size}
    if name in EXTENDED:
        assert ours.pop(name) <= header_says[name]
    assert ours == {key: header_says[key] for key in ours}


def test_constants_are_the_headers(header_says):
    ours = {name: value & 2**64 - 1 for name, value in declared_constants().items() if name not in NEWER}
    assert len(ours) > 100
    assert ours == {name: header_says[name] for name in ours}


def exported(soname: str) -> set[str]:
    """`name@version` of what a library of the system exports, as readelf sees it."""
    skip_without_libraries()
    skip_without_readelf()
    path = next((path for path in Path("/usr/lib").glob(f"*/{soname}")), None)
    if path is None:
        pytest.skip(f"{soname} is not in a folder of /usr/lib")
    listing = subprocess.run(["readelf", "-W", "--dyn-syms", path], check=True, capture_output=True, text=True)
    return set(re.findall(r"FUNC\s.*\s(\w+@+[\w.]+)", listing.stdout.replace("@@", "@")))


@pytest.mark.parametrize(
    "soname, functions", [("libibverbs.so.1", libraries.IBVERBS), ("libmlx5.so.1", libraries.MLX5)]
)
def test_every_symbol_is_there_in_the_version_that_is_asked_for(soname, functions):
    wanted = {f"{name}@{function.version}" for name, function in functions.items()}
    assert wanted <= exported(soname)


@pytest.mark.parametrize("load", [libraries.libibverbs, libraries.libmlx5])
def test_the_real_libraries_load_with_all_functions(load):
    skip_without_libraries()
    library = load.__wrapped__()
    for name in library.functions:
        assert library.has(name)
        assert callable(getattr(library, name))


def test_every_function_of_the_boundary_is_bound():
    """The functions that GPUNetIO resolves, those of newer releases, and what its samples want."""
    ibverbs = """
        get_device_list free_device_list get_device_name open_device close_device alloc_pd dealloc_pd reg_mr dereg_mr
        query_device query_port query_gid query_qp create_ah destroy_ah create_cq destroy_cq create_srq destroy_srq
        create_qp destroy_qp modify_qp create_comp_channel destroy_comp_channel get_cq_event ack_cq_events query_srq
        modify_srq reg_dmabuf_mr reg_mr_iova2 get_async_event ack_async_event resize_cq rereg_mr
    """
    mlx5 = """
        init_obj devx_obj_create devx_obj_destroy devx_obj_query devx_obj_modify devx_general_cmd devx_query_eqn
        devx_umem_reg devx_umem_reg_ex devx_umem_dereg devx_alloc_uar devx_free_uar query_device is_supported
        devx_create_event_channel devx_destroy_event_channel devx_subscribe_devx_event devx_get_event
        get_clock_info create_flow_matcher destroy_flow_matcher create_flow create_steering_anchor
        destroy_steering_anchor
    """
    assert {f"ibv_{name}" for name in ibverbs.split()} | {"_ibv_query_gid_ex"} == set(libraries.IBVERBS)
    assert {f"mlx5dv_{name}" for name in mlx5.split()} == set(libraries.MLX5)


def test_each_version_names_its_release():
    for functions in (libraries.IBVERBS, libraries.MLX5):
        for function in functions.values():
            assert function.version in libraries._SINCE


# --- what is missing is explained -------------------------------------------------------------------------------------


def test_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setenv("GPUNETIO_LIBMLX5", "/nowhere/libmlx5.so.1")
    with pytest.raises(NotSupportedError, match=r"/nowhere/libmlx5\.so\.1 cannot be loaded .*: install ibverbs-provid"):
        libraries.libmlx5.__wrapped__()


@pytest.fixture
def poor_library(tmp_path) -> Path:
    """A libmlx5 with the mandatory functions of rdma-core 24: none in the versions that came later."""
    functions = [name for name, function in libraries.MLX5.items() if not function.optional]
    source, script, library = tmp_path / "poor.c", tmp_path / "poor.map", tmp_path / "poor.so"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in functions))
    by_version: dict[str, list[str]] = {}
    for name in functions:
        by_version.setdefault(libraries.MLX5[name].version, []).append(name)
    script.write_text(
        "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in by_version.items())
    )
    subprocess.run(
        ["gcc", "-shared", "-fPIC", source, f"-Wl,--version-script={script}", "-o", library], check=True, timeout=60
    )
    return library


def test_a_missing_optional_function_is_explained_when_it_is_called(poor_library, monkeypatch):
    monkeypatch.setenv("GPUNETIO_LIBMLX5", str(poor_library))
    library = libraries.libmlx5.__wrapped__()
    assert not library.has("mlx5dv_devx_umem_reg_ex")
    with pytest.raises(NotSupportedError, match=r"has no mlx5dv_devx_umem_reg_ex@MLX5_1\.19, .* since release 35: "):
        library.mlx5dv_devx_umem_reg_ex(None, None)


def test_a_missing_mandatory_function_is_explained_at_once(poor_library, monkeypatch):
    monkeypatch.setenv("GPUNETIO_LIBIBVERBS", str(poor_library))
    with pytest.raises(NotSupportedError, match=r"has no ibv_get_device_list@IBVERBS_1\.1"):
        libraries.libibverbs.__wrapped__()
