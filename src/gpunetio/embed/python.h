// Runs a statement in the program's Python. A program without Python gets an interpreter, which has no signal handlers.
#pragma once

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct python {           // python.py fills it in
    const char *library;  // libpython, for a program without Python
    const char *home;     // of that Python
    const char *version;  // "3.11": the one that gpunetio is installed for
    const char *path;     // entries of sys.path, with colons between them
    void (*fail)(const char *what, const char *about);  // takes the reason of a failure
};

static int (*python_is_initialized)(void);
static void *(*python_thread)(void);  // the calling thread's state
static int (*python_ensure)(void);  // takes the GIL
static void (*python_release)(int);
static int (*python_has_gil)(void);  // the calling thread
static void *(*python_save)(void);  // lets the GIL go
static void (*python_restore)(void *);
static int (*python_execute)(const char *);  // source code
static pid_t python_process;

// Whether Python can be called. From its end on, only the thread that ends it can, and only until all modules are gone:
// destructors in C++ and functions of atexit(3) run later.
static bool python_lives(void) { return python_is_initialized && (python_is_initialized() || python_thread()); }

// How many calls into Python the thread is in. Threads that are created meanwhile are Python's.
static __thread int python_depth;

struct python_caller {  // what a call into Python leaves as it was
    sigset_t signals;
    int error;
};

// Threads that Python starts meanwhile get no signals but those of faults of their own: a program may have left the others
// to one thread (signalfd(2)). The program's errno stays: Python changes it in calls that succeed, and no function of the
// C library may set it to 0 (C11 7.5p3).
static struct python_caller python_enter(void)
{
    static const int own[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP};
    struct python_caller caller = {.error = errno};
    python_depth++;
    sigset_t others;
    sigfillset(&others);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(&others, own[i]);
    pthread_sigmask(SIG_BLOCK, &others, &caller.signals);
    return caller;
}

static void python_leave(struct python_caller caller)
{
    python_depth--;
    pthread_sigmask(SIG_SETMASK, &caller.signals, NULL);
    errno = caller.error;
}

// The value of a call into Python, or `otherwise` if Python cannot be called.
#define IN_PYTHON(call, otherwise) \
    ({ \
        struct python_caller caller = python_enter(); \
        __typeof__(call) returned = python_lives() ? (call) : (otherwise); \
        python_leave(caller); \
        returned; \
    })

// The value of a call that may take long, and during which other threads must be able to run Python: the calling thread lets
// the GIL go, if it has that.
#define WITHOUT_PYTHONS_LOCK(call) \
    ({ \
        void *state = python_lives() && python_has_gil() ? python_save() : NULL; \
        __typeof__(call) returned = (call); \
        int error = errno; \
        if (state) python_restore(state); \
        errno = error; \
        returned; \
    })

// A program in C ends without Python, whose threads go on while exit(3) calls the destructors of libraries. So none may use
// LLVM any more. LLVM's destructors come later than this, as it was there before, but for those of what it makes when it
// first compiles: then Python registers this again. A child of fork(2) has no other threads.
static void python_end(void)
{
    if (getpid() != python_process || !python_lives()) return;
    int state = python_ensure();
    python_execute("import gpunetio.compiler\ngpunetio.compiler.end()\n");
    python_release(state);
}

static void *python_symbol(const struct python *how, void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found) how->fail("libpython lacks ", name);
    return found;
}

static bool python_start(const struct python *how, const char *statement)
{
    void *python = RTLD_DEFAULT;
    bool ours = false;
    if (!dlsym(python, "Py_IsInitialized")) {
        if (!*how->library) return how->fail("the program has no Python, and gpunetio's has no shared library", ""), false;
        python = dlopen(how->library, RTLD_NOW | RTLD_GLOBAL);
        if (!python) return how->fail("Python cannot be loaded: ", dlerror()), false;
    }
    python_thread = python_symbol(how, python, "PyGILState_GetThisThreadState");
    python_is_initialized = python_symbol(how, python, "Py_IsInitialized");
    void (*initialize)(int) = python_symbol(how, python, "Py_InitializeEx");
    python_has_gil = python_symbol(how, python, "PyGILState_Check");
    python_save = python_symbol(how, python, "PyEval_SaveThread");
    python_restore = python_symbol(how, python, "PyEval_RestoreThread");
    python_ensure = python_symbol(how, python, "PyGILState_Ensure");
    python_release = python_symbol(how, python, "PyGILState_Release");
    python_execute = python_symbol(how, python, "PyRun_SimpleString");
    void (*set_home)(const wchar_t *) = python_symbol(how, python, "Py_SetPythonHome");
    if (!python_thread || !python_is_initialized || !initialize || !python_ensure || !python_release || !python_has_gil ||
        !python_save || !python_restore || !python_execute || !set_home)
        return false;
    char code[2048];
    int length = snprintf(
        code, sizeof code,
        "def _gpunetio():\n"
        "    import ctypes, sys\n"
        "    wanted, path = (ctypes.string_at(place).decode() for place in (%llu, %llu))\n"
        "    found = '%%d.%%d' %% sys.version_info[:2]\n"
        "    if found != wanted:\n"
        "        raise ImportError(f'the program runs Python {found}, and gpunetio is installed for {wanted}')\n"
        "    sys.path += [part for part in path.split(':') if part not in sys.path]\n"
        "    %s\n"
        "try:\n"
        "    _gpunetio()\n"
        "finally:\n"
        "    del _gpunetio\n",
        (unsigned long long)(uintptr_t)how->version, (unsigned long long)(uintptr_t)how->path, statement);
    if (length < 0 || (size_t)length >= sizeof code) return how->fail("the statement is too long: ", statement), false;
    if (!python_is_initialized()) {
        static wchar_t home[PATH_MAX];
        if (*how->home && mbstowcs(home, how->home, PATH_MAX - 1) != (size_t)-1) set_home(home);
        initialize(0);
        ours = true;
    }
    int state = ours ? 0 : python_ensure();
    int failed = python_execute(code);
    if (ours) {
        if (!failed) {  // else nothing of gpunetio runs
            snprintf(code, sizeof code, "import gpunetio.compiler\ngpunetio.compiler.ends_by(%llu)\n",
                     (unsigned long long)(uintptr_t)python_end);
            python_execute(code);
        }
        python_save();
        python_process = getpid();
        if (!failed) atexit(python_end);
    } else python_release(state);
    if (failed) how->fail("gpunetio cannot be imported: see the traceback on stderr", "");
    return !failed;
}

// Runs a statement after the modules of gpunetio can be imported. The reason of a failure goes to `fail`, and the
// traceback of an exception to stderr. Call it once (python_once), with no lock that Python may want.
static bool python_run(const struct python *how, const char *statement)
{
    struct python_caller caller = python_enter();
    bool done = python_start(how, statement);
    python_leave(caller);
    return done;
}

// pthread_once(3) for a function that calls python_run. Whoever waits for it lets the GIL go, which the first thread needs,
// and which changes hands while that imports. The symbols of python_run may not have been found yet.
static void python_once(pthread_once_t *once, void (*start)(void))
{
    int error = errno;
    int (*is_initialized)(void) = dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    int (*has_gil)(void) = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    void *(*save)(void) = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    void (*restore)(void *) = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    bool has_python = is_initialized && has_gil && save && restore && is_initialized();
    void *state = has_python && has_gil() ? save() : NULL;
    pthread_once(once, start);
    if (state) restore(state);
    errno = error;
}
