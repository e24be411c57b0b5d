// driver.h - the functions of device.h as a table that every kind of device fills in.
#ifndef KERNELS_DRIVER_H
#define KERNELS_DRIVER_H

#include "kernels/device.h"

struct device_driver {
    int (*arena)(struct device *, size_t bytes, void **base, struct error *);
    int (*host_arena)(struct device *, size_t bytes, bool pinned, void **base, struct error *);
    void (*copy_in)(struct device *, void *device_dst, const void *host_src, size_t bytes);
    void (*copy_out)(struct device *, void *host_dst, const void *device_src, size_t bytes);
    void (*peek)(struct device *, void *host_dst, const void *device_src, size_t bytes);
    void (*poke)(struct device *, void *device_dst, const void *host_src, size_t bytes);
    void (*fill)(struct device *, void *device_dst, int byte, size_t bytes);
    uint64_t (*pageable_copies)(const struct device *);
    double (*matmul_rate)(struct device *, size_t n);
    void (*close)(struct device *);
    // Emulated devices; NULL: nothing to do.
    void (*set_link)(struct device *, const struct device_link *);
    void (*get_link)(const struct device *, struct device_link *);
    void (*rest)(struct device *);
    // Devices that queue; NULL where `queues` is false.
    void (*begin)(struct device *, enum device_lane, const char *label);
    void *(*stream)(struct device *, enum device_lane);
    void (*end)(struct device *, enum device_lane, size_t mark);
    int (*marks)(struct device *, size_t n, struct error *);
    void (*await)(struct device *, enum device_lane, size_t mark);
    bool (*passed)(struct device *, size_t mark);
    double (*passed_s)(struct device *, size_t mark);
    void (*sync)(struct device *);
    int (*status)(struct device *, struct error *);
};

// One per kind. STATUS_FAIL: it cannot be used here, and why.
int cpu_open(struct device **out, const struct device_config *config, struct error *err);
// Is there a GPU that cuda_open can use?
int cuda_probe(struct error *err);
int cuda_open(struct device **out, const struct device_config *config, struct error *err);

// Zero-filled host memory that a device's arena of some gigabytes is well served by; NULL: none.
void *host_map(size_t bytes);
void host_unmap(void *p, size_t bytes);

#endif
