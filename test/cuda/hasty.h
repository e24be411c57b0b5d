// hasty.h - functions for a driver that believes everything that is queued to be done.
#ifndef TEST_CUDA_HASTY_H
#define TEST_CUDA_HASTY_H

#include "kernels/clock.h"
#include "kernels/device.h"

static bool passed_at_once(struct device *dev, size_t mark)
{
    (void)dev;
    (void)mark;
    return true;
}

static double passed_now(struct device *dev, size_t mark)
{
    (void)dev;
    (void)mark;
    return clock_s();
}

#endif
