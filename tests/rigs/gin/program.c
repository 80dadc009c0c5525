// A program without Python that loads the plugin and makes all calls of a communicator of one rank, as NCCL does.
//
//     program PLUGIN
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int (*function)();
enum { INIT = 1, DEVICES, GIN_PROPERTIES, PROPERTIES, LISTEN, CONNECT, CREATE, REG_MR, REG_DMABUF, DEREG_MR, DESTROY,
       CLOSE_COLL, CLOSE_LISTEN, PROGRESS, LAST_ERROR, FINALIZE };  // members of v14, 8 bytes each

static void log_line(int level, unsigned long flags, const char *file, int line, const char *format, ...)
{
    va_list list;
    (void)flags, (void)file, (void)line;
    va_start(list, format);
    printf("%d ", level);
    vprintf(format, list);
    printf("\n");
    va_end(list);
}

#define NEED(call) \
    do { \
        int result = (call); \
        if (result) return printf("%s: %d\n", #call, result), 1; \
    } while (0)

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    void *library = dlopen(count > 1 ? arguments[1] : "", RTLD_NOW | RTLD_LOCAL);
    if (!library) return printf("%s\n", dlerror()), 1;
    const function *table = dlsym(library, "ncclGinPlugin_v14");
    if (!table) return printf("%s\n", dlerror()), 1;

    static char memory[4096], handle[128];
    int devices = 0, config[7] = {2, 1, 1, 0, -1, 2, 1};
    void *ctx, *listener, *coll, *contexts, *window, *keys, *handles[] = {handle};
    struct {
        int32_t type, version;
        uint64_t *contexts;
    } *device_handle;
    _Bool failed = 1;

    int early = table[DEVICES](&devices);
    if (early != 5) return printf("a call before init: %d\n", early), 1;
    NEED(table[INIT](&ctx, (uint64_t)1, log_line));
    NEED(table[DEVICES](&devices));
    NEED(table[LISTEN](ctx, 0, handle, &listener));
    NEED(table[CONNECT](ctx, handles, 1, 0, listener, &coll));
    NEED(table[CLOSE_LISTEN](listener));
    NEED(table[REG_MR](coll, memory, sizeof memory, 1, (uint64_t)0, &window, &keys));
    NEED(table[CREATE](coll, config, &contexts, &device_handle));
    NEED(device_handle->type != 3 || device_handle->contexts[0] == 0 || devices != 1);
    NEED(table[PROGRESS](contexts));
    NEED(table[LAST_ERROR](contexts, &failed) || failed);
    NEED(table[DESTROY](contexts));
    NEED(table[DEREG_MR](coll, window));
    NEED(table[CLOSE_COLL](coll));
    NEED(table[FINALIZE](ctx));
    if (dlclose(library)) return printf("%s\n", dlerror()), 1;
    printf("done\n");
    return 0;
}
