"""Which of torch's kernels draw from a device's default generator."""

import pathlib

import pytest
import torch
import torchgen

# All are lent the generator of the cell that runs. A new one may do what none of these
# does: look at it before it is added here.
KNOWN = {
    "_cudnn_attention_backward",
    "_cudnn_attention_forward",
    "_cudnn_init_dropout_state",
    "_cudnn_rnn",
    "_efficient_attention_forward",
    "_fill_mem_eff_dropout_mask_",
    "_flash_attention_forward",
    "_flash_attention_forward.quantized",
    "_flash_attention_forward_no_dropout_inplace",  # draws nothing
    "_fused_sdp_choice",  # chooses a kernel, and draws nothing
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention.quantized",
    "_triton_scaled_dot_attention",
    "miopen_rnn",
    "native_dropout",
}


def drawing(key):
    """Names of the operations that draw without a generator and have a kernel."""
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}".rstrip(".")
        if not schema.name.startswith("aten::"):
            continue
        if any("Generator" in str(a.type) for a in schema.arguments):
            continue
        packet = getattr(torch.ops.aten, schema.name[6:], None)
        overload = getattr(packet, schema.overload_name or "default", None)
        if overload is None or torch.Tag.nondeterministic_seeded not in overload.tags:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            found.add(name[6:])
    return found


@pytest.mark.gpu
def test_kernels_that_draw_from_the_default_generator_are_known():
    found = drawing("CUDA")
    assert "native_dropout" in found
    assert found <= KNOWN


def test_the_list_holds_what_torch_says_of_its_kernels():
    yaml = pytest.importorskip("yaml", reason="torch's list of operations is YAML")
    packaged = pathlib.Path(torchgen.__file__).parent / "packaged/ATen/native"
    found = set()
    for entry in yaml.safe_load((packaged / "native_functions.yaml").read_text()):
        kinds = [key for keys in entry.get("dispatch", {}) for key in keys.split(", ")]
        drawing = "nondeterministic_seeded" in str(entry.get("tags"))
        if drawing and "CUDA" in kinds and "Generator" not in entry["func"]:
            found.add(entry["func"].partition("(")[0])
    assert "native_dropout" in found
    assert found <= KNOWN


def test_the_list_names_operations_of_torch():
    found = drawing("CPU")
    assert "native_dropout" in found
    assert found - KNOWN <= {"_scaled_dot_product_flash_attention_for_cpu"}, found
