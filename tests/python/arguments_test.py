"""The arguments of Horovod's functions: scripts give them by position or by name, so that what is ours comes after them."""

import inspect

import pytest

import sirtaki.torch as hvd

OF_ALLREDUCE = "op=None prescale_factor=1.0 postscale_factor=1.0 process_set"
OF_REDUCESCATTER = "op process_set prescale_factor=1.0 postscale_factor=1.0"

# The arguments of horovod 0.28.
HOROVOD = {
    "init": "comm=None process_sets=None",
    "start_timeline": "file_path mark_cycles=False",
    "allreduce": "tensor average=None name=None compression " + OF_ALLREDUCE,
    "allreduce_": "tensor average=None name=None " + OF_ALLREDUCE,
    "allreduce_async": "tensor average=None name=None " + OF_ALLREDUCE,
    "allreduce_async_": "tensor average=None name=None " + OF_ALLREDUCE,
    "grouped_allreduce": "tensors average=None name=None compression " + OF_ALLREDUCE,
    "grouped_allreduce_": "tensors average=None name=None " + OF_ALLREDUCE,
    "grouped_allreduce_async": "tensors average=None name=None " + OF_ALLREDUCE,
    "grouped_allreduce_async_": "tensors average=None name=None " + OF_ALLREDUCE,
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name=None process_set",
    "allgather_async": "tensor name=None process_set",
    "grouped_allgather": "tensors name=None process_set",
    "grouped_allgather_async": "tensors name=None process_set",
    "broadcast": "tensor root_rank name=None process_set",
    "broadcast_": "tensor root_rank name=None process_set",
    "broadcast_async": "tensor root_rank name=None process_set",
    "broadcast_async_": "tensor root_rank name=None process_set",
    "alltoall": "tensor splits=None name=None process_set",
    "alltoall_async": "tensor splits=None name=None process_set",
    "reducescatter": "tensor name=None compression " + OF_REDUCESCATTER,
    "reducescatter_async": "tensor name=None " + OF_REDUCESCATTER,
    "grouped_reducescatter": "tensors name=None compression " + OF_REDUCESCATTER,
    "grouped_reducescatter_async": "tensors name=None " + OF_REDUCESCATTER,
    "poll": "handle",
    "synchronize": "handle",
    "join": "device=-1",
    "barrier": "process_set",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model=None",
    "broadcast_object": "obj root_rank=0 name=None process_set",
    "allgather_object": "obj name=None",
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "SyncBatchNorm": "num_features eps=1e-05 momentum=0.1 affine=True track_running_stats=True",
    "DistributedOptimizer": "optimizer named_parameters=None compression backward_passes_per_step=1 op "
                            "gradient_predivide_factor=1.0 num_groups=0 groups=None sparse_as_dense=False process_set",
    "run": "func args=() kwargs=None num_proc=1 min_num_proc=None max_num_proc=None slots=None reset_limit=None "
           "cooldown_range=None hosts=None hostfile=None host_discovery_script=None start_timeout=None ssh_port=None "
           "ssh_identity_file=None disable_cache=None output_filename=None verbose=None use_gloo=None use_mpi=None "
           "mpi_args=None network_interface=None network_interfaces=None executable=None np=None min_np=None max_np=None",
}
DEFAULTS = {"process_set": hvd.global_process_set, "compression": hvd.Compression.none, "op": hvd.Average}


@pytest.mark.parametrize("name", HOROVOD)
def test_arguments_are_horovod_s_in_its_order(name):
    wanted = HOROVOD[name].split()
    ours = list(inspect.signature(getattr(hvd, name)).parameters.values())
    assert [parameter.name for parameter in ours[:len(wanted)]] == [argument.partition("=")[0] for argument in wanted]
    for argument, parameter in zip(wanted, ours):
        assert parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
        known, _, default = argument.partition("=")
        if default:
            assert str(parameter.default) == default
        elif known in DEFAULTS and parameter.default is not inspect.Parameter.empty and "sparse" not in name:
            assert parameter.default is DEFAULTS[known]
    required = [p.name for p in ours[len(wanted):]
                if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    assert not required
