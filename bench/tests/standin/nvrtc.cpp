// A stand-in for NVRTC: compiles kernels with the C++ compiler of the machine. A "cubin" is the path of the library that it
// made, which the stand-in driver loads. Each text is compiled once a folder, the one that this library lies in.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <functional>
#include <regex>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kCompilationFailed = 6;

struct Program {
  std::string text, library, log;
};

std::string folder() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void *>(&folder), &info)) abort();
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/'));
}

bool exists(const std::string &path) { return access(path.c_str(), R_OK) == 0; }

// For each kernel a function that launches it.
std::string launchers(const std::string &text) {
  static const std::regex kernel("extern \"C\" __global__ void (__launch_bounds__\\(\\d+\\) )?(\\w+)\\(");
  std::string all;
  for (std::sregex_iterator at(text.begin(), text.end(), kernel), end; at != end; ++at) {
    const std::string name = (*at)[2];
    all += "extern \"C\" void launch_" + name + "(void **parameters, unsigned blocks, standin::Turn before,\n"
           "    standin::Turn after, void *turn) { standin::launch(" + name + ", parameters, blocks, before, after, turn); }\n";
  }
  return all;
}

} // namespace

EXPORT const char *nvrtcGetErrorString(int status) { return status == kSuccess ? "success" : "failed"; }

EXPORT int nvrtcVersion(int *major, int *minor) {
  *major = 13;
  *minor = 0;
  return kSuccess;
}

EXPORT int nvrtcCreateProgram(Program **program, const char *source, const char *, int headers, const char *const *texts,
                              const char *const *names) {
  *program = new Program{source, "", ""};
  mkdir((folder() + "/portway").c_str(), 0777);
  for (int i = 0; i < headers; i++) std::ofstream(folder() + "/" + names[i]) << texts[i];
  return kSuccess;
}

EXPORT int nvrtcDestroyProgram(Program **program) {
  delete *program;
  *program = nullptr;
  return kSuccess;
}

EXPORT int nvrtcCompileProgram(Program *program, int, const char *const *) {
  const std::string stem = folder() + "/" + std::to_string(std::hash<std::string>()(program->text));
  program->library = stem + ".so";
  if (exists(program->library)) return kSuccess;
  const std::string made = stem + "." + std::to_string(getpid());
  std::ofstream(made + ".cpp") << "#include \"kernels.hpp\"\n" << program->text << launchers(program->text);
  const char *compiler = getenv("CXX");
  const std::string command = std::string(compiler ? compiler : "c++") + " -std=c++17 -O1 -w -shared -fPIC -pthread -I" +
                              folder() + " -o " + made + ".so " + made + ".cpp >" + made + ".log 2>&1";
  if (std::system(command.c_str()) || std::rename((made + ".so").c_str(), program->library.c_str())) {
    std::ifstream log(made + ".log");
    program->log.assign(std::istreambuf_iterator<char>(log), {});
    return kCompilationFailed;
  }
  return kSuccess;
}

EXPORT int nvrtcGetProgramLogSize(Program *program, size_t *len) {
  *len = program->log.size() + 1;
  return kSuccess;
}
EXPORT int nvrtcGetProgramLog(Program *program, char *log) {
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return kSuccess;
}
EXPORT int nvrtcGetCUBINSize(Program *program, size_t *len) {
  *len = program->library.size() + 1;
  return kSuccess;
}
EXPORT int nvrtcGetCUBIN(Program *program, char *cubin) {
  std::memcpy(cubin, program->library.c_str(), program->library.size() + 1);
  return kSuccess;
}
