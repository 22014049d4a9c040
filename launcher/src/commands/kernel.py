"""Installs or removes a Jupyter kernel that memtrace records. `memtrace kernel` runs this with the Python of the kernel.

The argument is the request, as JSON. Prints the answer as JSON: `path` and `warnings`, or `error` and `help`.
"""

import json
import os
import shutil
import sys
import tempfile


def fail(error, help):
    print(json.dumps({"error": error, "help": help}))
    sys.exit()


def kernels_folder(request):
    """The folder of kernels that the request names; None if it names none."""
    if request["location"] == "user":
        from jupyter_core.paths import jupyter_data_dir

        return os.path.join(jupyter_data_dir(), "kernels")
    prefix = sys.prefix if request["location"] == "sys-prefix" else request["prefix"]
    return prefix and os.path.join(os.path.abspath(prefix), "share", "jupyter", "kernels")


def is_own(path):
    """Whether `memtrace kernel install` has made the kernel."""
    try:
        with open(os.path.join(path, "kernel.json"), encoding="utf-8") as file:
            return "memtrace" in json.load(file).get("metadata", {})
    except (OSError, ValueError, AttributeError):
        return False


def install(request):
    from importlib.util import find_spec

    from ipykernel.kernelspec import get_kernel_dict, write_kernel_spec
    from jupyter_client.kernelspec import KernelSpecManager

    name, folder = request["name"], kernels_folder(request)
    existing = os.path.join(folder, name.lower())
    if os.path.lexists(existing) and not is_own(existing):
        fail("%s is a kernel that memtrace has not installed" % existing, "use another --name")
    warnings = []
    spec = get_kernel_dict()
    arguments = spec["argv"][1:]
    if find_spec("gpu_memtrace") is not None:
        arguments.append("--ext=gpu_memtrace")
    else:
        warnings.append("%s has no gpu_memtrace: the kernel is recorded, and has no %%memtrace" % sys.executable)
    if folder not in KernelSpecManager().kernel_dirs:
        warnings.append("%s is not in the search path of %s's Jupyter (JUPYTER_PATH)" % (folder, sys.executable))
    # Jupyter kills what has not ended a few seconds after its request.
    spec["argv"] = [request["memtrace"], "run", "--quiet", "--reports-in-background", *request["options"], "--", sys.executable, *arguments]
    spec["display_name"] = request["display_name"] or "Python %d.%d (memtrace)" % sys.version_info[:2]
    spec["metadata"] = {**spec.get("metadata", {}), "memtrace": {"version": request["version"]}}
    # Jupyter installs a folder. Its name is not that of the kernel.
    with tempfile.TemporaryDirectory() as scratch:
        path = write_kernel_spec(os.path.join(scratch, "kernel"), overrides=spec)
        # jupyter_client replaces an installed kernel of this name.
        prefix = os.path.dirname(os.path.dirname(os.path.dirname(folder)))
        where = {"user": True} if request["location"] == "user" else {"prefix": prefix}
        path = KernelSpecManager().install_kernel_spec(path, kernel_name=name, **where)
    return {"path": path, "display_name": spec["display_name"], "warnings": warnings}


def remove(request):
    from jupyter_client.kernelspec import KernelSpecManager

    name, folder = request["name"].lower(), kernels_folder(request)
    if folder is not None:
        path = os.path.join(folder, name)
    else:
        path = KernelSpecManager().find_kernel_specs().get(name)
    if path is None or not os.path.isdir(path):
        fail("there is no kernel %s%s" % (name, " in " + folder if folder else ""), "`jupyter kernelspec list` lists all kernels")
    if not is_own(path):
        fail("%s is a kernel that memtrace has not installed" % path, "`jupyter kernelspec remove` removes any kernel")
    if os.path.islink(path):
        os.remove(path)
    else:
        shutil.rmtree(path)
    return {"path": path, "warnings": []}


def main():
    # `python -c` imports from the current folder.
    if sys.path[0] == "":
        del sys.path[0]
    request = json.loads(sys.argv[1])
    try:
        answer = {"install": install, "remove": remove}[request["action"]](request)
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("ipykernel", "jupyter_client", "jupyter_core"):
            help = "%s -m pip install ipykernel, or name the Python of your notebooks: --python PATH" % sys.executable
            fail("%s has no ipykernel" % sys.executable, help)
        fail("%s cannot import ipykernel: %s" % (sys.executable, error), "%s -m ipykernel_launcher --version" % sys.executable)
    except OSError as error:
        reason = "cannot write %s: %s" % (error.filename or kernels_folder(request), os.strerror(error.errno or 0))
        fail(reason, "choose another place with --user, --sys-prefix or --prefix DIR")
    except ValueError as error:
        fail(str(error), "a name has ASCII letters, digits, and -._")
    print(json.dumps(answer))


main()
