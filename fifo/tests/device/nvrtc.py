"""Compiles a kernel with NVRTC for one GPU, with the headers given by name as portway_fifo::header gives them.

usage: nvrtc.py LIB_FOLDER GPU KERNEL.cu NAME=HEADER...
Prints nothing but what is wrong.
"""

import ctypes
import sys


def main(folder, gpu, kernel, *headers):
    ctypes.CDLL(f"{folder}/libnvrtc-builtins.so.13.0", mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(f"{folder}/libnvrtc.so.13")
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(what, status):
        if status != 0:
            sys.exit(f"{what}: {nvrtc.nvrtcGetErrorString(status).decode()}")

    def text(path):
        with open(path, "rb") as file:
            return file.read()

    def strings(values):
        return (ctypes.c_char_p * len(values))(*values)

    names = strings([header.split("=", 1)[0].encode() for header in headers])
    texts = strings([text(header.split("=", 1)[1]) for header in headers])
    options = strings([f"--gpu-architecture={gpu}".encode(), b"--std=c++17"])
    program = ctypes.c_void_p()
    check(
        "nvrtcCreateProgram",
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), text(kernel), kernel.encode(), len(headers), texts, names
        ),
    )
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)
    size = ctypes.c_size_t()
    check("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    check("nvrtcGetProgramLog", nvrtc.nvrtcGetProgramLog(program, log))
    check(f"nvrtcCompileProgram: {log.value.decode()}", status)
    if log.value.strip():
        sys.exit(log.value.decode())  # warnings
    check("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    if size.value == 0:
        sys.exit("no cubin, so ptxas did not see the kernel")


main(*sys.argv[1:])
