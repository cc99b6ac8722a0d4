/* A libcuda.so.1 without a device, so that the real cuda-python can be called: device memory is memory files.
   Only the functions that prefixcache_offload.gpu calls, and only what it relies on of each. With FAKE_NO_DESCRIPTORS in
   the environment, memory cannot be shared by descriptor. Every call with an argument that makes no sense is an error. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <fcntl.h>

typedef int R;
typedef unsigned long long P;
typedef struct { int type, id; } Location;
typedef struct { int type, handles; Location location; void *win32; unsigned char rest[8]; } Properties;
typedef struct { Location location; int flags; } Access;
enum { OK = 0, INVALID = 1, NOT_FOUND = 500, NO_CONTEXT = 201, BAD_DEVICE = 101 };

static __thread int current;
static int retained;

R cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    *found = dlsym(RTLD_DEFAULT, name);
    if (!*found) { char v2[128]; snprintf(v2, sizeof v2, "fake_%s", name); *found = dlsym(RTLD_DEFAULT, v2); }
    if (status) *status = *found ? 0 : 1;
    return *found ? OK : NOT_FOUND;
}
R cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, found, version, flags, 0);
}
R cuDriverGetVersion(int *version) { *version = 13000; return OK; }
R cuInit(unsigned flags) { return flags ? INVALID : OK; }
R cuDeviceGetCount(int *count) { *count = 1; return OK; }
R cuDeviceGet(int *device, int index) { *device = 0; return index ? BAD_DEVICE : OK; }
R cuDeviceGetUuid(unsigned char *uuid, int device) { for (int i = 0; i < 16; i++) uuid[i] = i; return device ? BAD_DEVICE : OK; }
R cuDeviceGetUuid_v2(unsigned char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
R cuDeviceGetAttribute(int *value, int which, int device) {
    *value = !getenv("FAKE_NO_DESCRIPTORS");
    return which == 102 || which == 103 ? OK : INVALID;
}
R cuDevicePrimaryCtxRetain(void **context, int device) { *context = &retained; retained++; return OK; }
R cuDevicePrimaryCtxRelease(int device) { retained--; return OK; }
R cuDevicePrimaryCtxRelease_v2(int device) { return cuDevicePrimaryCtxRelease(device); }
R cuCtxPushCurrent(void *context) { current++; return context == &retained ? OK : INVALID; }
R cuCtxPushCurrent_v2(void *context) { return cuCtxPushCurrent(context); }
R cuCtxPopCurrent(void **context) { if (!current) return NO_CONTEXT; current--; *context = &retained; return OK; }
R cuCtxPopCurrent_v2(void **context) { return cuCtxPopCurrent(context); }
R cuMemGetInfo(size_t *free, size_t *total) { *free = 1ull << 40; *total = *free + 300; return current ? OK : NO_CONTEXT; }
R cuMemGetInfo_v2(size_t *free, size_t *total) { return cuMemGetInfo(free, total); }

static int proper(const Properties *p) {
    return p->type == 1 && p->handles == 1 && p->location.type == 1 && p->location.id == 0;
}
R cuMemGetAllocationGranularity(size_t *size, const Properties *p, int option) {
    *size = 2 << 20;
    return proper(p) && !option ? OK : INVALID;
}
R cuMemCreate(P *handle, size_t size, const Properties *p, uint64_t flags) {
    if (!proper(p) || size % (2 << 20) || flags) return INVALID;
    int fd = memfd_create("fake device memory", 0);
    if (ftruncate(fd, size)) return INVALID;
    *handle = 0x1000 + fd;
    return OK;
}
R cuMemRelease(P handle) { return close((int)(handle - 0x1000)) ? INVALID : OK; }
R cuMemExportToShareableHandle(void *out, P handle, int type, uint64_t flags) {
    if (type != 1 || flags) return INVALID;
    *(int *)out = dup((int)(handle - 0x1000));
    return OK;
}
R cuMemImportFromShareableHandle(P *handle, void *os, int type) {
    struct stat seen;
    int fd = (int)(intptr_t)os;
    if (type != 1 || fstat(fd, &seen)) return INVALID;
    *handle = 0x1000 + dup(fd);
    return OK;
}
R cuMemAddressReserve(P *address, size_t size, size_t alignment, P hint, uint64_t flags) {
    if (alignment || hint || flags) return INVALID;
    *address = (P)mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return OK;
}
R cuMemAddressFree(P address, size_t size) { return munmap((void *)address, size) ? INVALID : OK; }
R cuMemMap(P address, size_t size, size_t offset, P handle, uint64_t flags) {
    void *made = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)(handle - 0x1000), 0);
    return made == (void *)address && !offset && !flags ? OK : INVALID;
}
R cuMemUnmap(P address, size_t size) {
    mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return OK;
}
R cuMemSetAccess(P address, size_t size, const Access *a, size_t count) {
    if (count != 1 || a->location.type != 1 || a->location.id || (a->flags != 1 && a->flags != 3)) return INVALID;
    return mprotect((void *)address, size, a->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ) ? INVALID : OK;
}

static int last_fd;
static size_t last_size;
R cuMemAlloc(P *address, size_t size) {
    last_fd = memfd_create("fake device memory", 0);
    if (!current || ftruncate(last_fd, last_size = size)) return INVALID;
    *address = (P)mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, last_fd, 0);
    return OK;
}
R cuMemAlloc_v2(P *address, size_t size) { return cuMemAlloc(address, size); }
R cuMemFree(P address) { return munmap((void *)address, last_size) || close(last_fd) ? INVALID : OK; }
R cuMemFree_v2(P address) { return cuMemFree(address); }
typedef struct { int pid, fd; size_t size; char rest[48]; } Ipc;
R cuIpcGetMemHandle(Ipc *handle, P address) {
    memset(handle, 0, sizeof *handle);
    handle->pid = getpid(); handle->fd = last_fd; handle->size = last_size;
    return OK;
}
static size_t opened_size;
R cuIpcOpenMemHandle(P *address, Ipc handle, unsigned flags) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(path, O_RDWR);
    if (fd < 0 || flags != 1) return INVALID;
    *address = (P)mmap(0, opened_size = handle.size, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    return OK;
}
R cuIpcOpenMemHandle_v2(P *address, Ipc handle, unsigned flags) { return cuIpcOpenMemHandle(address, handle, flags); }
R cuIpcCloseMemHandle(P address) { return munmap((void *)address, opened_size) ? INVALID : OK; }
R cuMemGetAddressRange(P *base, size_t *size, P address) { *base = address; *size = opened_size; return OK; }
R cuMemGetAddressRange_v2(P *base, size_t *size, P address) { return cuMemGetAddressRange(base, size, address); }

R cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); return flags == 1 && current ? OK : INVALID; }
R cuStreamDestroy(void *stream) { free(stream); return OK; }
R cuStreamDestroy_v2(void *stream) { return cuStreamDestroy(stream); }
R cuStreamSynchronize(void *stream) { return OK; }
R cuEventCreate(void **event, unsigned flags) { *event = malloc(1); return flags == 3 ? OK : INVALID; }
R cuEventDestroy(void *event) { free(event); return OK; }
R cuEventDestroy_v2(void *event) { return cuEventDestroy(event); }
R cuEventRecord(void *event, void *stream) { return event && stream && current ? OK : INVALID; }
R cuEventSynchronize(void *event) { return event ? OK : INVALID; }
R cuMemcpyHtoDAsync(P to, const void *from, size_t size, void *stream) {
    memcpy((void *)to, from, size);
    return stream && current ? OK : INVALID;
}
R cuMemcpyHtoDAsync_v2(P to, const void *from, size_t size, void *stream) { return cuMemcpyHtoDAsync(to, from, size, stream); }
R cuMemcpyDtoHAsync(void *to, P from, size_t size, void *stream) {
    memcpy(to, (void *)from, size);
    return stream && current ? OK : INVALID;
}
R cuMemcpyDtoHAsync_v2(void *to, P from, size_t size, void *stream) { return cuMemcpyDtoHAsync(to, from, size, stream); }
