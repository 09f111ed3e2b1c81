/* Delays reads, writes and syncs of a KV store's segments: LD_PRELOAD of tests.
 *
 * The file that FAULTY_DISK names has the operation and the seconds, such as "write 0.2"; "-" for none. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static int is_segment(int file)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 6)
        return 0;
    path[length] = 0;
    return strstr(path, ".data") != NULL || strstr(path, ".index") != NULL;
}

static void delay(const char *operation, int file)
{
    const char *name = getenv("FAULTY_DISK");
    char asked[16] = "-";
    double seconds = 0;
    FILE *control = name && is_segment(file) ? fopen(name, "r") : NULL;
    if (control == NULL)
        return;
    if (fscanf(control, "%15s %lf", asked, &seconds) != 2)
        strcpy(asked, "-");
    fclose(control);
    if (strcmp(asked, operation) == 0) {
        struct timespec time = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
        nanosleep(&time, NULL);
    }
}

ssize_t pread64(int file, void *buffer, size_t count, off64_t offset)
{
    static ssize_t (*next)(int, void *, size_t, off64_t);
    if (next == NULL)
        next = dlsym(RTLD_NEXT, "pread64");
    delay("read", file);
    return next(file, buffer, count, offset);
}

ssize_t pwrite64(int file, const void *buffer, size_t count, off64_t offset)
{
    static ssize_t (*next)(int, const void *, size_t, off64_t);
    if (next == NULL)
        next = dlsym(RTLD_NEXT, "pwrite64");
    delay("write", file);
    return next(file, buffer, count, offset);
}

int fdatasync(int file)
{
    static int (*next)(int);
    if (next == NULL)
        next = dlsym(RTLD_NEXT, "fdatasync");
    delay("sync", file);
    return next(file);
}
