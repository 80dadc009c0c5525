"""Our declarations of the kernel's interface against its own headers, compiled."""

import re
import subprocess
from enum import IntEnum
from pathlib import Path

import pytest

from gpunetio.embed.building import HEADER
from gpunetio.formats.cm import PortSpace
from gpunetio.formats.layout import Entry
from gpunetio.uverbs import abi, call, sockaddr, ucma_abi
from repository import ROOT
from stand_in.building import compiler, why_no_headers

PRELOAD = ROOT / "src" / "gpunetio" / "uverbs" / "preload.c"
HEADERS = (
    "linux/types.h", "rdma/ib_user_verbs.h", "rdma/ib_user_ioctl_verbs.h", "rdma/ib_user_ioctl_cmds.h",
    "rdma/rdma_user_ioctl_cmds.h", "rdma/mlx5-abi.h", "rdma/mlx5_user_ioctl_cmds.h", "rdma/mlx5_user_ioctl_verbs.h",
    "linux/in.h", "rdma/rdma_user_cm.h",
)
# Members with other names there: of nested structures, of unions.
INSIDE = {
    "ib_uverbs_ex_query_device_resp": "base.", "ib_uverbs_query_port_resp_ex": "legacy_resp.",
    "ib_uverbs_ex_create_qp_resp": "base.",
}
OUTSIDE = {"comp_mask", "response_length", "timestamp_mask", "hca_core_clock", "device_cap_flags_ex", "port_cap_flags2"}
RENAMED = {
    ("ib_uverbs_gid_entry", "netdev_index"): "netdev_ifindex",
    ("ib_uverbs_ah_attr", "dgid"): "grh.dgid", ("ib_uverbs_ah_attr", "flow_label"): "grh.flow_label",
    ("ib_uverbs_ah_attr", "sgid_index"): "grh.sgid_index", ("ib_uverbs_ah_attr", "hop_limit"): "grh.hop_limit",
    ("ib_uverbs_ah_attr", "traffic_class"): "grh.traffic_class",
}
CONSTANTS = {
    "UVERBS_ATTR_UHW_IN": abi.UHW_IN, "UVERBS_ATTR_UHW_OUT": abi.UHW_OUT, "RDMA_DRIVER_MLX5": abi.DRIVER_MLX5,
    "IB_USER_VERBS_CMD_FLAG_EXTENDED": abi.EXTENDED, "UVERBS_ATTR_DESTROY_CQ_HANDLE": abi.DESTROYED,
    "UVERBS_ATTR_DESTROY_CQ_RESP": abi.DESTROY_RESP, "UVERBS_METHOD_CQ_CREATE": abi.CREATE,
    "UVERBS_METHOD_QP_DESTROY": abi.DESTROY, "UVERBS_METHOD_PD_DESTROY": abi.DESTROY_ONLY,
    "UVERBS_METHOD_AH_DESTROY": abi.DESTROY_ONLY, "UVERBS_METHOD_MR_DESTROY": abi.DESTROY_MR,
    "UVERBS_METHOD_QUERY_MR": abi.QUERY_MR, "UVERBS_METHOD_REG_DMABUF_MR": abi.REG_DMABUF_MR,
    "UVERBS_METHOD_ASYNC_EVENT_ALLOC": abi.ALLOC,
    "MLX5_IB_METHOD_UAR_OBJ_ALLOC": abi.UAR_ALLOC, "MLX5_IB_METHOD_UAR_OBJ_DESTROY": abi.UAR_DESTROY,
    "MLX5_IB_METHOD_DEVX_OTHER": abi.DEVX_OTHER, "MLX5_IB_METHOD_DEVX_QUERY_UAR": abi.DEVX_QUERY_UAR,
    "MLX5_IB_METHOD_DEVX_QUERY_EQN": abi.DEVX_QUERY_EQN, "MLX5_IB_METHOD_DEVX_OBJ_CREATE": abi.DEVX_OBJ_CREATE,
    "MLX5_IB_METHOD_DEVX_OBJ_DESTROY": abi.DEVX_OBJ_DESTROY, "MLX5_IB_METHOD_DEVX_OBJ_MODIFY": abi.DEVX_OBJ_MODIFY,
    "MLX5_IB_METHOD_DEVX_OBJ_QUERY": abi.DEVX_OBJ_QUERY, "MLX5_IB_METHOD_DEVX_UMEM_REG": abi.DEVX_UMEM_REG,
    "MLX5_IB_METHOD_DEVX_UMEM_DEREG": abi.DEVX_UMEM_DEREG, "MLX5_IB_ATTR_DEVX_QUERY_EQN_USER_VEC": abi.EQN_VECTOR,
    "MLX5_IB_ATTR_DEVX_QUERY_EQN_DEV_EQN": abi.EQN_OUT, "MLX5_IB_ATTR_DEVX_QUERY_UAR_USER_IDX": abi.UAR_INDEX,
    "MLX5_IB_ATTR_DEVX_QUERY_UAR_DEV_IDX": abi.UAR_PAGE,
    "MLX5_IB_METHOD_DEVX_SUBSCRIBE_EVENT": abi.DEVX_SUBSCRIBE_EVENT,
    "MLX5_IB_METHOD_DEVX_ASYNC_EVENT_FD_ALLOC": abi.DEVX_EVENT_FD_ALLOC,
    "MLX5_IB_UAPI_DEVX_CR_EV_CH_FLAGS_OMIT_DATA": abi.OMIT_DATA,
    "UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE": abi.ASYNC_EVENT_FD,
    "IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS": abi.OPTIONAL_MR_ACCESS,
    "MLX5_USER_CMDS_SUPP_UHW_QUERY_DEVICE": abi.UHW_QUERY_DEVICE,
    "MLX5_USER_CMDS_SUPP_UHW_CREATE_AH": abi.UHW_CREATE_AH, "MLX5_USER_INLINE_MODE_NONE": abi.INLINE_NONE,
    "MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX": abi.CQ_UAR_PAGE_INDEX, "MLX5_QP_FLAG_SCATTER_CQE": abi.QP_SCATTER_CQE,
    "MLX5_QP_FLAG_ALLOW_SCATTER_CQE": abi.QP_ALLOW_SCATTER_CQE,
    "MLX5_QP_FLAG_PACKET_BASED_CREDIT_MODE": abi.QP_PACKET_BASED_CREDIT,
    "MLX5_QP_FLAG_UAR_PAGE_INDEX": abi.QP_UAR_PAGE_INDEX, "RDMA_USER_CM_ABI_VERSION": ucma_abi.ABI_VERSION,
    "RDMA_OPTION_ID": ucma_abi.Level.ID, "RDMA_OPTION_IB": ucma_abi.Level.IB, "RDMA_PS_TCP": PortSpace.TCP,
    "RDMA_PS_UDP": PortSpace.UDP, "RDMA_PS_IB": PortSpace.IB,
}
# By the prefix of the header's names.
ENUMS: dict[str, type[IntEnum]] = {
    "IB_USER_VERBS_CMD_": abi.Write, "IB_USER_VERBS_EX_CMD_": abi.WriteExtended,
    "UVERBS_ATTR_GET_CONTEXT_": abi.GetContext,
    "UVERBS_ATTR_QUERY_PORT_": abi.QueryPort, "UVERBS_ATTR_QUERY_GID_TABLE_": abi.GidTable,
    "UVERBS_ATTR_QUERY_GID_ENTRY_": abi.Gid, "UVERBS_ATTR_CREATE_CQ_": abi.CreateCq,
    "UVERBS_ATTR_CREATE_QP_": abi.CreateQp, "UVERBS_ATTR_CREATE_SRQ_": abi.CreateSrq,
    "UVERBS_ATTR_QUERY_MR_": abi.QueryMr, "UVERBS_ATTR_REG_DMABUF_MR_": abi.RegDmabufMr,
    "MLX5_IB_ATTR_UAR_OBJ_ALLOC_": abi.Uar, "UVERBS_METHOD_": abi.Method,
    "MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_": abi.Subscribe, "MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_": abi.EventFd,
    "MLX5_IB_ATTR_DEVX_UMEM_REG_": abi.Umem, "IB_UVERBS_QPT_": abi.QpKind,
    "RDMA_USER_CM_CMD_": ucma_abi.Command, "RDMA_OPTION_ID_": ucma_abi.Option,
}
MEMBERS = {
    **{f"UVERBS_OBJECT_{o.name}": o for o in abi.Object if o < abi.Object.DEVX},
    **{f"MLX5_IB_OBJECT_{o.name}": o for o in abi.Object if o >= abi.Object.DEVX},
    "UVERBS_ATTR_CORE_IN": abi.Invoke.IN, "UVERBS_ATTR_CORE_OUT": abi.Invoke.OUT,
    "UVERBS_ATTR_WRITE_CMD": abi.Invoke.CMD, "MLX5_IB_ATTR_DEVX_OTHER_CMD_IN": abi.Devx.IN,
    "MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT": abi.Devx.OUT, "MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE": abi.DevxObject.HANDLE,
    "MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN": abi.DevxObject.IN,
    "MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT": abi.DevxObject.OUT,
    "MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF": abi.UarType.BLUEFLAME, "MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC": abi.UarType.NONCACHE,
}

def structures() -> dict[str, Entry]:
    found = [entry for module in (abi, call, ucma_abi, sockaddr) for entry in vars(module).values()]
    return {type(entry).__name__: entry for entry in found if isinstance(entry, Entry)}


def path(structure: str, field: str) -> str:
    """The member's name in the headers."""
    inside = "" if field in OUTSIDE else INSIDE.get(structure, "")
    return RENAMED.get((structure, field), inside + field)


@pytest.fixture(scope="module")
def header_says(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Sizes, offsets and values as the C compiler has them."""
    if compiler() is None:
        pytest.skip("no C compiler")
    if missing := [header for header in HEADERS if not Path("/usr/include", header).exists()]:
        pytest.skip(f"the kernel's headers lack {missing[0]} (linux-libc-dev)")
    lines = []
    for name, entry in structures().items():
        lines.append(f'P("{name}", sizeof(struct {name}));')
        lines += [
            f'P("{name}.{field}", offsetof(struct {name}, {path(name, field)}));' for field in entry.offsets
        ]
    for prefix, enum in ENUMS.items():
        lines += [f'P("{prefix}{member.name}", {prefix}{member.name});' for member in enum]
    lines += [f'P("{name}", {name});' for name in (*CONSTANTS, *MEMBERS)]
    folder = tmp_path_factory.mktemp("abi")
    source, program = folder / "abi.c", folder / "abi"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n" + "".join(f"#include <{header}>\n" for header in HEADERS)
        + '#define P(name, value) printf("%s %llu\\n", name, (unsigned long long)(value))\n'
        + "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    subprocess.run([compiler() or "cc", "-w", source, "-o", program], check=True, timeout=60)
    out = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout
    return {name: int(value) for name, value in (line.rsplit(" ", 1) for line in out.splitlines())}


def test_structures(header_says):
    assert len(structures()) > 25
    for name, entry in structures().items():
        assert entry.size == header_says[name], name
        for field, offset in entry.offsets.items():
            assert offset == header_says[f"{name}.{field}"], f"{name}.{field}"


def test_numbers(header_says):
    for prefix, enum in ENUMS.items():
        for member in enum:
            assert int(member) == header_says[f"{prefix}{member.name}"], f"{prefix}{member.name}"
    for name, value in {**CONSTANTS, **MEMBERS}.items():
        assert int(value) == header_says[name], name


def test_libibverbs(tmp_path):
    """The members of libibverbs' structures that preload.c declares for itself."""
    if why := why_no_headers():
        pytest.skip(why)
    places = {}
    for text, members in {
        "#include <infiniband/verbs.h>": [
            "struct ibv_context, ops.poll_cq", "struct ibv_context, ops.post_send", "struct ibv_context, cmd_fd",
            "struct ibv_cq, context", "struct ibv_qp, context", "struct ibv_qp_ex, qp_base.context",
            "struct ibv_qp_ex, wr_complete",
        ],
        f'#include "{PRELOAD}"': [
            "struct context, poll_cq", "struct context, post_send", "struct context, cmd_fd", "struct cq, context",
            "struct qp, context", "struct qp_ex, qp.context", "struct qp_ex, wr_complete",
        ],
    }.items():
        prints = "".join(f'printf("%zu ", offsetof({member}));' for member in members)
        (tmp_path / "places.c").write_text(
            f"{text}\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{ {prints} }}\n"
        )
        command = [compiler() or "cc", "-w", "-std=gnu11", f"-I{HEADER.parent}", "places.c", "-o", "places"]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
        out = subprocess.run([tmp_path / "places"], check=True, capture_output=True, text=True, timeout=60).stdout
        places[text] = out.split()
    theirs, ours = places.values()
    assert len(ours) == 7
    assert ours == theirs


def test_names_are_the_headers():
    """A structure that the headers do not have could not be compared."""
    theirs = re.compile("(ib_uverbs|mlx5_ib|rdma_ucm|ib_user)_[a-z0-9_]+|sockaddr_in6?")
    assert all(theirs.fullmatch(name) for name in structures())
