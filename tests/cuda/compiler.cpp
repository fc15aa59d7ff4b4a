// NVRTC's functions over the host's C++ compiler and kernels/shim.h (FAKE_SHIM): the "machine code" is a library of the host.
//
// FAKE_TOGETHER=N: nothing is compiled, and each program waits until N are being compiled at once; without them it fails after a
// minute. FAKE_COMPILED names a file that gets a line for each program.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string>

struct Program {
    std::string source, code;
};

// Whether as many programs are being compiled at once as are wanted.
static bool together(int wanted) {
    static std::mutex mutex;
    static std::condition_variable arrived;
    static int here = 0;
    std::unique_lock<std::mutex> lock(mutex);
    here++;
    arrived.notify_all();
    return arrived.wait_for(lock, std::chrono::minutes(1), [=] { return here >= wanted; });
}

extern "C" {
int nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return 0;
}
int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char* const*, const char* const*) {
    *program = new Program{source, ""};
    return 0;
}
int nvrtcCompileProgram(Program* program, int, const char* const*) {
    if (const char* path = getenv("FAKE_COMPILED")) std::ofstream(path, std::ios::app) << "a program\n";
    if (const char* wanted = getenv("FAKE_TOGETHER")) {
        program->code = "no code";
        return together(atoi(wanted)) ? 0 : 6;
    }
    char folder[] = "/tmp/fake-nvrtc-XXXXXX";
    if (!mkdtemp(folder)) return 6;
    std::string base = std::string(folder) + "/kernels", library = base + ".so";
    std::ofstream(base + ".cpp") << "#include \"" << getenv("FAKE_SHIM") << "\"\n" << program->source;
    std::string command = "c++ -std=c++17 -O2 -U_FORTIFY_SOURCE -ffp-contract=off -fPIC -w ";
#ifdef RACES
    Dl_info self;
    dladdr((void*)nvrtcCompileProgram, &self);
    std::string path = self.dli_fname, watch = path.substr(0, path.rfind('/') + 1) + "watch.o";
    command += "-fsanitize=thread --param tsan-instrument-func-entry-exit=0 -fno-tree-loop-distribute-patterns -fno-threadsafe-statics -c -o " + base + ".o " + base +
               ".cpp && c++ -shared -o " + library + " " + base + ".o " + watch;
#else
    command += "-shared -o " + library + " " + base + ".cpp";
#endif
    int status = system(command.c_str());
    unlink((base + ".o").c_str());
    std::ifstream made(library, std::ios::binary);
    program->code.assign(std::istreambuf_iterator<char>(made), {});
    unlink(library.c_str());
    unlink((base + ".cpp").c_str());
    rmdir(folder);
    return status == 0 ? 0 : 6;
}
int nvrtcDestroyProgram(Program** program) {
    delete *program;
    return 0;
}
int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
    *bytes = program->code.size();
    return 0;
}
int nvrtcGetCUBIN(Program* program, char* code) {
    memcpy(code, program->code.data(), program->code.size());
    return 0;
}
int nvrtcGetPTXSize(Program* program, size_t* bytes) { return nvrtcGetCUBINSize(program, bytes); }
int nvrtcGetPTX(Program* program, char* code) { return nvrtcGetCUBIN(program, code); }
int nvrtcGetProgramLogSize(Program*, size_t* bytes) {
    *bytes = 1;
    return 0;
}
int nvrtcGetProgramLog(Program*, char* log) {
    *log = 0;
    return 0;
}
}
