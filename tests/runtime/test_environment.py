import platform
import sys

import jax
import pytest

from jaxdist.errors import MeshError
from jaxdist.runtime import environment


def plan(environ, fake_devices):
    planned = environment.plan_environment(environ, fake_devices=fake_devices)
    return planned, environment.parse_xla_flags(planned["XLA_FLAGS"])


@pytest.mark.parametrize(("devices", "threads"), [(2, "4"), (8, "16")])
def test_thread_pool_goes_with_the_device_count(devices, threads):
    planned, flags = plan({}, devices)
    assert planned["NPROC"] == threads
    assert flags["--xla_force_host_platform_device_count"] == str(devices)
    assert planned["JAX_PLATFORMS"] == "cpu"


def test_a_larger_thread_pool_is_kept():
    assert "NPROC" not in plan({"NPROC": "64"}, 8)[0]
    assert plan({"NPROC": "8"}, 8)[0]["NPROC"] == "16"


def test_a_count_from_the_users_flags_gets_its_threads_too():
    planned, _ = plan({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, None)
    assert planned["NPROC"] == "8"
    assert "JAX_PLATFORMS" not in planned


def test_a_libtpu_without_a_tpu_is_no_backend_unless_the_user_says_so():
    def platforms(environ):
        planned = environment.plan_environment(environ, fake_devices=None, idle_libtpu=True)
        return planned.get("JAX_PLATFORMS")

    assert platforms({}) == "cpu"
    assert platforms({"JAX_PLATFORMS": "tpu"}) is None


@pytest.mark.parametrize("node", [None, "accel0", "vfio/0", "nvidia0", "kfd"])
def test_libtpu_is_idle_where_no_accelerator_is(node, tmp_path, monkeypatch):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: name)
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio/vfio").touch()
    if node:
        (tmp_path / node).touch()
    assert environment.has_idle_libtpu(tmp_path) is (node is None)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    assert environment.has_idle_libtpu(tmp_path) is False


def test_collective_timeouts_are_set_and_the_users_win():
    flag = "--xla_cpu_collective_timeout_seconds"
    assert plan({}, None)[1][flag] == str(environment.COLLECTIVE_TIMEOUT_SECONDS)
    assert plan({"XLA_FLAGS": f"{flag}=7"}, None)[1][flag] == "7"


def test_too_late_after_jax_is_imported():
    assert "jax" in sys.modules
    with pytest.raises(MeshError, match=r"13 fake devices .* after jax was imported"):
        environment.prepare(fake_devices=13)


def test_preparing_again_for_the_same_count_is_fine():
    environment.prepare(fake_devices=8)


def test_versions_are_in_the_order_asked_for_and_none_where_nothing_is_installed():
    found = environment.versions(("jax", "no-such-package", "python"))
    assert list(found.items()) == [
        ("jax", jax.__version__),
        ("no-such-package", None),
        ("python", platform.python_version()),
    ]
