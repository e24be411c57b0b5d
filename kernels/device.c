// device.c - opens a device of the kind that is asked for, and passes the calls of device.h on.
#include "kernels/driver.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#ifdef USE_CUDA
#define KINDS "auto, cpu, cuda"
#else
#define KINDS "auto, cpu"
#endif

const char *device_kind(const char *asked, char *why, size_t size)
{
    snprintf(why, size, "%s", "");
    if (strcmp(asked, "auto") != 0) {
        return asked;
    }
#ifdef USE_CUDA
    struct error err;
    if (cuda_probe(&err) == STATUS_OK) {
        return "cuda";
    }
    const char *text = strstr(err.text, ": "); // behind the option's name
    snprintf(why, size, "%s", text ? text + 2 : err.text);
#endif
    return "cpu";
}

int device_open(struct device **out, const struct device_config *config, struct error *err)
{
    char why[sizeof err->text];
    const char *kind = device_kind(config->kind, why, sizeof why);
    if (strcmp(kind, "cpu") == 0) {
        return cpu_open(out, config, err);
    }
#ifdef USE_CUDA
    if (strcmp(kind, "cuda") == 0) {
        return cuda_open(out, config, err);
    }
#endif
    return error_set(err, STATUS_USAGE,
                     "--device %s: this build has " KINDS "; cuda needs one made by make CUDA=1",
                     kind);
}

int device_memory(const struct device_config *config, size_t *bytes, struct error *err)
{
    struct device_config free = *config;
    struct device *dev;
    *bytes = SIZE_MAX;
    if (strcmp(config->kind, "cpu") == 0) {
        return STATUS_OK;
    }
    free.memory = 0;
    if (device_open(&dev, &free, err)) {
        return err->status;
    }
    *bytes = dev->memory;
    device_close(dev);
    return STATUS_OK;
}

void *host_map(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        return NULL;
    }
    madvise(p, bytes, MADV_HUGEPAGE); // advice only: fewer page faults and TLB misses
    return p;
}

void host_unmap(void *p, size_t bytes)
{
    if (p) {
        munmap(p, bytes);
    }
}

int device_arena(struct device *dev, size_t bytes, void **base, struct error *err)
{
    return dev->driver->arena(dev, bytes, base, err);
}

int device_host_arena(struct device *dev, size_t bytes, bool pinned, void **base, struct error *err)
{
    return dev->driver->host_arena(dev, bytes, pinned, base, err);
}

void device_copy_in(struct device *dev, void *device_dst, const void *host_src, size_t bytes)
{
    dev->driver->copy_in(dev, device_dst, host_src, bytes);
}

void device_copy_out(struct device *dev, void *host_dst, const void *device_src, size_t bytes)
{
    dev->driver->copy_out(dev, host_dst, device_src, bytes);
}

void device_peek(struct device *dev, void *host_dst, const void *device_src, size_t bytes)
{
    dev->driver->peek(dev, host_dst, device_src, bytes);
}

void device_poke(struct device *dev, void *device_dst, const void *host_src, size_t bytes)
{
    dev->driver->poke(dev, device_dst, host_src, bytes);
}

void device_fill(struct device *dev, void *device_dst, int byte, size_t bytes)
{
    dev->driver->fill(dev, device_dst, byte, bytes);
}

uint64_t device_pageable_copies(const struct device *dev)
{
    return dev->driver->pageable_copies(dev);
}

double device_matmul_rate(struct device *dev, size_t n)
{
    return dev->driver->matmul_rate(dev, n);
}

void device_close(struct device *dev)
{
    dev->driver->close(dev);
}

// ---- what not every device does -----------------------------------------------------------------

void device_set_link(struct device *dev, const struct device_link *link)
{
    if (dev->driver->set_link) {
        dev->driver->set_link(dev, link);
    }
}

void device_get_link(const struct device *dev, struct device_link *link)
{
    *link = (struct device_link){0};
    if (dev->driver->get_link) {
        dev->driver->get_link(dev, link);
    }
}

void device_rest(struct device *dev)
{
    if (dev->driver->rest) {
        dev->driver->rest(dev);
    }
}

void device_begin(struct device *dev, enum device_lane lane, const char *label)
{
    if (dev->queues) {
        dev->driver->begin(dev, lane, label);
    }
}

void *device_stream(struct device *dev, enum device_lane lane)
{
    return dev->queues ? dev->driver->stream(dev, lane) : NULL;
}

void device_end(struct device *dev, enum device_lane lane, size_t mark)
{
    if (dev->queues) {
        dev->driver->end(dev, lane, mark);
    }
}

int device_marks(struct device *dev, size_t n, struct error *err)
{
    return dev->queues ? dev->driver->marks(dev, n, err) : STATUS_OK;
}

void device_await(struct device *dev, enum device_lane lane, size_t mark)
{
    if (dev->queues) {
        dev->driver->await(dev, lane, mark);
    }
}

bool device_passed(struct device *dev, size_t mark)
{
    return !dev->queues || dev->driver->passed(dev, mark);
}

double device_passed_s(struct device *dev, size_t mark)
{
    return dev->driver->passed_s(dev, mark);
}

void device_sync(struct device *dev)
{
    if (dev->queues) {
        dev->driver->sync(dev);
    }
}

int device_status(struct device *dev, struct error *err)
{
    return dev->queues ? dev->driver->status(dev, err) : STATUS_OK;
}
