// Kernels with one bug each, and kernels without.
#include "test/cuda/planted.h"

#include "kernels/cuda/ops.h"

#define N PLANTED_FLOATS

static float same(const float *in, size_t i)
{
    return in[i];
}

static float not_a_number(const float *in, size_t i)
{
    (void)in, (void)i;
    return NAN;
}

// ---- races in shared memory ----

static __global__ void no_barrier(float *out, const float *in)
{
    __shared__ float s[256];
    s[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = s[(threadIdx.x + 37) % 256];
}

// The barrier before the next round's writes is missing.
static __global__ void no_barrier_after(float *out, const float *in)
{
    DYN_SMEM(float, s);
    float sum = 0;
    for (int round = 0; round < 3; round++) {
        s[threadIdx.x] = in[round * 256 + threadIdx.x];
        __syncthreads();
        sum += s[255 - threadIdx.x];
    }
    out[threadIdx.x] = sum;
}

static __global__ void no_warp_barrier(float *out, const float *in)
{
    __shared__ float s[8][32];
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    s[warp][lane] = in[threadIdx.x];
    out[threadIdx.x] = s[warp][lane ^ 1];
}

// A barrier of each warp does not order the warps.
static __global__ void warp_barrier_for_block(float *out, const float *in)
{
    __shared__ float s[256];
    s[threadIdx.x] = in[threadIdx.x];
    __syncwarp();
    out[threadIdx.x] = s[255 - threadIdx.x];
}

static __global__ void all_write_one(float *out, const float *in)
{
    __shared__ float s;
    s = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = s;
}

// Lanes 0 to 15 wait for each other, and read what lanes 16 to 31 have written.
static __global__ void half_a_warp_barrier(float *out, const float *in)
{
    __shared__ float s[32];
    s[threadIdx.x] = in[threadIdx.x];
    if (threadIdx.x < 16) {
        __syncwarp(0xffffu);
        out[threadIdx.x] = s[threadIdx.x + 16];
    }
}

// A shuffle is no barrier for memory.
static __global__ void shuffle_for_barrier(float *out, const float *in)
{
    __shared__ float s[32];
    s[threadIdx.x] = in[threadIdx.x];
    float x = __shfl_sync(0xffffffffu, in[threadIdx.x], 0);
    out[threadIdx.x] = s[threadIdx.x ^ 1] + x;
}

// The barrier of the second round is missing.
static __global__ void one_warp_barrier(float *out, const float *in)
{
    __shared__ float s[2][32];
    s[0][threadIdx.x] = in[threadIdx.x];
    __syncwarp();
    s[1][threadIdx.x] = s[0][threadIdx.x ^ 1];
    out[threadIdx.x] = s[1][threadIdx.x ^ 2];
}

// Of threads i * EVERY, the last one to come writes what all have read.
template <unsigned EVERY> static __global__ void last_one_writes(float *out, const float *in)
{
    __shared__ float s;
    __shared__ unsigned n;
    if (threadIdx.x == 0) {
        s = in[0];
        n = 0;
    }
    __syncthreads();
    if (threadIdx.x % EVERY == 0) {
        out[threadIdx.x] = s;
        if (atomicAdd(&n, 1u) == blockDim.x / EVERY - 1) {
            s = 1;
        }
    }
}

static __global__ void plain_and_atomic(float *out, const float *in)
{
    __shared__ int n;
    if (threadIdx.x == 0) {
        n = (int)in[0];
    }
    atomicAdd(&n, 1);
    out[threadIdx.x] = in[threadIdx.x];
}

// ---- bounds ----

static __global__ void reads_beyond(float *out, const float *in)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i + 1];
}

static __global__ void writes_beyond(float *out, const float *in)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= N) {
        out[i] = in[i % N];
    }
}

static __global__ void writes_input(float *out, const float *in)
{
    const_cast<float *>(in)[threadIdx.x] = out[threadIdx.x];
}

static __global__ void wild_read(float *out, const float *in)
{
    out[threadIdx.x] = in[(size_t)threadIdx.x << 40];
}

static __global__ void dynamic_beyond(float *out, const float *in)
{
    DYN_SMEM(float, s);
    s[threadIdx.x + 1] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x + 1];
}

static __global__ void static_beyond(float *out, const float *in)
{
    __shared__ float before[32], s[31], after[32];
    before[threadIdx.x] = after[threadIdx.x] = in[threadIdx.x];
    s[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = s[threadIdx.x] + before[threadIdx.x] + after[threadIdx.x];
}

static __global__ void dynamic_before(float *out, const float *in)
{
    DYN_SMEM(float, s);
    s[(int)threadIdx.x - 1] = in[threadIdx.x];
    out[threadIdx.x] = 0;
}

static __global__ void static_far_beyond(float *out, const float *in)
{
    __shared__ float s[1024];
    s[threadIdx.x * 5] = in[threadIdx.x];
    out[threadIdx.x] = s[threadIdx.x * 5];
}

// ---- alignment ----

static __global__ void misaligned_load(float *out, const float *in)
{
    packed<float> v = load16(in + threadIdx.x * 4 + 2);
    store16(out + threadIdx.x * 4, v);
}

static __global__ void misaligned_store(float *out, const float *in)
{
    packed<float> v = load16(in + threadIdx.x * 4);
    store16(out + threadIdx.x * 4 + 1, v);
}

static __global__ void misaligned_shared(float *out, const float *in)
{
    DYN_SMEM(float, s);
    *reinterpret_cast<float2 *>(s + threadIdx.x * 2 + 1) = make_float2(in[threadIdx.x], 0);
    out[threadIdx.x] = 0;
}

// ---- divergence ----

static __global__ void some_at_barrier(float *out, const float *in)
{
    if (threadIdx.x < 16) {
        __syncthreads();
    }
    out[threadIdx.x] = in[threadIdx.x];
}

static __global__ void return_before_barrier(float *out, const float *in)
{
    if (threadIdx.x >= 250) {
        return;
    }
    __syncthreads();
    out[threadIdx.x] = in[threadIdx.x];
}

static __global__ void some_at_shuffle(float *out, const float *in)
{
    float x = in[threadIdx.x];
    if (x < 0.5f || threadIdx.x == 0) {
        x = warp_sum(x);
    }
    out[threadIdx.x] = x;
}

static __global__ void barrier_and_shuffle(float *out, const float *in)
{
    float x = in[threadIdx.x];
    if (threadIdx.x % 2) {
        x = warp_sum(x);
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = x;
}

static __global__ void shuffle_and_vote(float *out, const float *in)
{
    float x = in[threadIdx.x];
    if (threadIdx.x % 2) {
        x = __shfl_sync(0xffffffffu, x, 0);
    } else if (__any_sync(0xffffffffu, x > 0)) {
        x = 0;
    }
    out[threadIdx.x] = x;
}

static __global__ void shuffle_from_nobody(float *out, const float *in)
{
    out[threadIdx.x] = __shfl_down_sync(0xffffu, in[threadIdx.x], 8);
}

static __global__ void shuffle_in_part_of_warp(float *out, const float *in)
{
    out[threadIdx.x] = warp_sum(in[threadIdx.x]); // launched with 48 threads
}

// ---- races of blocks ----

static __global__ void blocks_write_one(float *out, const float *in)
{
    out[threadIdx.x] = in[(size_t)blockIdx.x * blockDim.x + threadIdx.x];
}

static __global__ void blocks_overlap(float *out, const float *in)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i];
    if (threadIdx.x == 0 && blockIdx.x == 3) {
        out[i + blockDim.x] = 1;
    }
}

static __global__ void block_reads_next(float *out, const float *in)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i];
    __syncthreads();
    if (i + 1 < N) {
        out[i] += out[i + 1] * 0;
    }
}

static __global__ void atomic_and_plain(float *out, const float *in)
{
    int *n = reinterpret_cast<int *>(out);
    if (threadIdx.x == 0 && blockIdx.x == 1) {
        *n = (int)in[0];
    } else if (threadIdx.x == 0) {
        atomicAdd(n, 1);
    }
}

static __global__ void last_block_writes(float *out, const float *in)
{
    out[2 + blockIdx.x] = out[0] + in[0];
    if (atomicAdd(reinterpret_cast<unsigned *>(out) + 1, 1u) == gridDim.x - 1) {
        out[0] = 1;
    }
}

// Counts, but does not wait to be the last: what others leave may not be there.
static __global__ void any_block(float *out, const float *in)
{
    out[1 + blockIdx.x] = in[blockIdx.x];
    __threadfence();
    atomicAdd(reinterpret_cast<unsigned *>(out), 1u);
    out[65 + blockIdx.x] = out[1 + (blockIdx.x + 1) % gridDim.x];
}

// The last block reads what others have not published.
static __global__ void no_fence(float *out, const float *in)
{
    out[1 + blockIdx.x] = in[blockIdx.x];
    if (atomicAdd(reinterpret_cast<unsigned *>(out), 1u) == gridDim.x - 1) {
        float sum = 0;
        for (unsigned i = 0; i < gridDim.x; i++) {
            sum += out[1 + i];
        }
        out[100] = sum;
    }
}

// ---- shared memory that nobody has written ----

static __global__ void never_written(float *out, const float *in)
{
    __shared__ float s[64];
    DYN_SMEM(float, d);
    unsigned i = threadIdx.x;
    out[blockIdx.x * 64 + i] = i % 2 ? s[i] : d[i];
    __syncthreads();
    s[i] = d[i] = in[i]; // the next block must not see it
}

// ---- cp.async ----

template <bool WAIT> static __global__ void async_copy(float *out, const float *in)
{
    DYN_SMEM(float, s);
    unsigned i = threadIdx.x * 4;
    sim_cp_async(s + i, in + i, 16, i == 8 ? 4 : 16);
    sim_cp_async_commit();
    sim_cp_async(s + 256 + i, in + 256 + i, 16, 16);
    sim_cp_async_commit();
    if (WAIT) {
        sim_cp_async_wait(1);
    }
    __syncthreads();
    unsigned from = 252 - i;
    store16(out + from, load16(s + from));
    if (WAIT) {
        sim_cp_async_wait(0);
    }
    __syncthreads();
    store16(out + 256 + from, load16(s + 256 + from));
}

static float async_result(const float *in, size_t i)
{
    return i > 8 && i < 12 ? 0 : in[i];
}

static __global__ void async_no_barrier(float *out, const float *in)
{
    DYN_SMEM(float, s);
    unsigned i = threadIdx.x * 4;
    sim_cp_async(s + i, in + i, 16, 16);
    sim_cp_async_commit();
    sim_cp_async_wait(0);
    store16(out + i, load16(s + 252 - i));
}

// ---- without a bug ----

static __global__ void reduce(float *out, const float *in)
{
    __shared__ float partial[32];
    float x = warp_sum(in[(size_t)blockIdx.x * blockDim.x + threadIdx.x]);
    for (int round = 0; round < 2; round++) { // the second time over what the first has left
        if (threadIdx.x % 32 == 0) {
            partial[threadIdx.x / 32] = x;
        }
        __syncthreads();
        float sum = threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0;
        sum = warp_sum(sum);
        if (threadIdx.x == 0) {
            out[blockIdx.x] = sum;
        }
        __syncthreads();
    }
}

static float reduced(const float *in, size_t i) // small integers: exact in any order
{
    float sum = 0;
    for (size_t j = 0; j < 256; j++) {
        sum += in[i * 256 + j];
    }
    return sum;
}

static __global__ void transpose(float *out, const float *in)
{
    __shared__ float tile[32][33];
    unsigned x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
    for (unsigned j = 0; j < 32; j += 8) {
        tile[threadIdx.y + j][threadIdx.x] = in[(y + j) * 64 + x];
    }
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x;
    y = blockIdx.x * 32 + threadIdx.y;
    for (unsigned j = 0; j < 32; j += 8) {
        out[(y + j) * 64 + x] = tile[threadIdx.x][threadIdx.y + j];
    }
}

static float transposed(const float *in, size_t i)
{
    return in[i % 64 * 64 + i / 64];
}

static __global__ void count(float *out, const float *in)
{
    __shared__ int bins[8];
    int *total = reinterpret_cast<int *>(out) + 8;
    if (threadIdx.x < 8) {
        bins[threadIdx.x] = 0;
    }
    __syncthreads();
    atomicAdd(&bins[(int)in[(size_t)blockIdx.x * blockDim.x + threadIdx.x] & 7], 1);
    __syncthreads();
    if (threadIdx.x < 8) {
        atomicAdd(&total[threadIdx.x], bins[threadIdx.x]);
    }
}

// The block that counts last adds up what all others have left.
static __global__ void last_block(float *out, const float *in)
{
    __shared__ bool last;
    float sum = warp_sum(in[(size_t)blockIdx.x * 32 + threadIdx.x]);
    if (threadIdx.x == 0) {
        out[8 + blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(reinterpret_cast<unsigned *>(out) + 7, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last) {
        sum = warp_sum(out[8 + threadIdx.x] + out[8 + 32 + threadIdx.x]);
        if (threadIdx.x == 0) {
            out[0] = sum;
        }
    }
}

static float total(const float *in, size_t i)
{
    float sum = 0;
    for (size_t j = 0; j < 64 * 32; j++) {
        sum += in[j];
    }
    return i ? 0 : sum;
}

static __global__ void neighbours(float *out, const float *in)
{
    __shared__ float s[256];
    unsigned i = threadIdx.x;
    float x = in[i];
    for (unsigned d = 16; d > 0; d /= 2) {
        s[i] = x;
        __syncwarp();
        float y = s[i ^ d];
        __syncwarp();
        x = y;
    }
    out[i] = __shfl_sync(0xffffffffu, x, (int)(31 - i % 32));
    if (!__all_sync(0xffffffffu, x >= 0) || __ballot_sync(0xffffffffu, i % 32 < 4) != 15 ||
        __any_sync(0xffffffffu, x < 0)) {
        out[i] = -1;
    }
    if (i % 32 < 16) { // half a warp
        float sum = __shfl_xor_sync(0xffffu, x, 1) + __shfl_up_sync(0xffffu, x, 1, 8);
        __syncwarp(0xffffu);
        if (sum < 0) {
            out[i] = -2;
        }
    }
}

// A product of two matrices (8,4) and (4,4) of which each lane has one element of each.
struct product {
    float a, b, c;
};

static void multiply(void *const *lanes)
{
    for (unsigned lane = 0; lane < 32; lane++) {
        struct product *p = (struct product *)lanes[lane];
        p->c = 0;
        for (unsigned k = 0; k < 4; k++) {
            p->c += ((const struct product *)lanes[lane / 4 * 4 + k])->a *
                    ((const struct product *)lanes[k * 4 + lane % 4])->b;
        }
    }
}

static __global__ void whole_warps(float *out, const float *in)
{
    unsigned lane = threadIdx.x % 32, first = threadIdx.x - lane;
    if (threadIdx.x >= 192) {
        return; // whole warps may
    }
    struct product p = {in[threadIdx.x], lane / 4 == lane % 4 ? 2.0f : 0.0f, 0}; // twice identity
    sim_warp(multiply, &p);
    float all[32];
    sim_warp_exchange(&p.c, sizeof p.c, all);
    out[threadIdx.x] = all[31 - lane] + all[lane] - 2 * in[first + 31 - lane] - in[threadIdx.x];
}

static __global__ void copies(float *out, const float *in)
{
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    __nv_bfloat16 narrow[8];
    for (int j = 0; j < 8; j += 4) {
        packed<float> v = load16(in + i + j);
        for (int k = 0; k < 4; k++) {
            narrow[j + k] = from_float<__nv_bfloat16>(v.x[k]);
        }
    }
    for (int j = 0; j < 8; j++) {
        out[i + j] = to_float(narrow[j]);
    }
    char bytes[40];
    memcpy(bytes, in + i, 32);
    memcpy(out + i, bytes, 4);
}

// Threads and blocks that write two bytes each side by side.
static __global__ void two_bytes(float *out, const float *in)
{
    __shared__ __nv_bfloat16 s[33];
    __nv_bfloat16 *to = reinterpret_cast<__nv_bfloat16 *>(out);
    size_t i = (size_t)blockIdx.x * 33 + threadIdx.x;
    s[threadIdx.x] = from_float<__nv_bfloat16>(in[i]);
    __syncwarp();
    to[i] = s[threadIdx.x];
}

static float two_of(const float *in, size_t i)
{
    __nv_bfloat16 x[2] = {__float2bfloat16(in[2 * i]), __float2bfloat16(in[2 * i + 1])};
    float both;
    __builtin_memcpy(&both, x, sizeof both);
    return both;
}

static __global__ void segments(float *out, const float *in)
{
    float lane = (float)(threadIdx.x % 32) + 0 * in[0];
    float sum = __shfl_sync(0xffffffffu, lane, 11, 8); // lane 3 of each segment
    sum += 32 * __shfl_up_sync(0xffffffffu, lane, 2, 8);
    sum += 1024 * __shfl_down_sync(0xffffffffu, lane, 3, 16);
    sum += 32768 * __shfl_xor_sync(0xffffffffu, lane, 16, 8);
    out[threadIdx.x] = sum;
}

static float shuffled(const float *in, size_t i)
{
    (void)in;
    size_t lane = i % 32, idx = lane / 8 * 8 + 3, up = lane % 8 < 2 ? lane : lane - 2,
           down = lane % 16 > 12 ? lane : lane + 3, bits = lane < 16 ? lane : lane - 16;
    return (float)(idx + 32 * up + 1024 * down + 32768 * bits);
}

static __global__ void corners(float *out, const float *in)
{
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    unsigned i = block * blockDim.x * blockDim.y * blockDim.z + thread;
    out[i] = in[i];
}

struct three {
    float x[3];
};

template <typename T, int ROUNDS>
static __global__ void takes(T *out, struct three s, double one, const T *in)
{
    T sum = 0;
    for (int i = 0; i < ROUNDS; i++) {
        sum += s.x[i] * (T)one;
    }
    out[threadIdx.x] = in[threadIdx.x] + sum;
}

// Arguments are converted, and taken when the launch is queued.
static void launch_takes(struct device *dev, float *out, const float *in)
{
    struct three s = {{1, 2, -3}};
    int one = 1;
    LAUNCH(dev, (takes<float, 3>), dim3(1), 32, 0, out, s, one, in);
    s.x[0] = 5;
    one = 2;
}

// ---- the table ----

#define KERNEL(kernel) #kernel, kernel

const struct planted planted[] = {
    {KERNEL(no_barrier), 1, 256, 0, SIM_SHARED_RACE, NULL, 0},
    {KERNEL(no_barrier_after), 1, 256, 1024, SIM_SHARED_RACE, NULL, 0},
    {KERNEL(no_warp_barrier), 1, 256, 0, SIM_SHARED_RACE, NULL, 0},
    {KERNEL(warp_barrier_for_block), 1, 256, 0, SIM_SHARED_RACE, NULL, 0},
    {KERNEL(all_write_one), 1, 64, 0, SIM_SHARED_RACE, NULL, 0},
    {KERNEL(half_a_warp_barrier), 1, 32, 0, SIM_SHARED_RACE, NULL, 0},
    {KERNEL(shuffle_for_barrier), 1, 32, 0, SIM_SHARED_RACE, NULL, 0},
    {KERNEL(one_warp_barrier), 1, 32, 0, SIM_SHARED_RACE, NULL, 0},
    {KERNEL(last_one_writes<1>), 1, 32, 0, SIM_SHARED_RACE, NULL, 0},
    {KERNEL(last_one_writes<32>), 1, 256, 0, SIM_SHARED_RACE, NULL, 0},
    {KERNEL(plain_and_atomic), 1, 64, 0, SIM_SHARED_RACE, NULL, 0},
    {KERNEL(reads_beyond), N / 256, 256, 0, SIM_BOUNDS, NULL, 0},
    {KERNEL(writes_beyond), N / 256 + 1, 256, 0, SIM_BOUNDS, NULL, 0},
    {KERNEL(writes_input), 1, 32, 0, SIM_BOUNDS, NULL, 0},
    {KERNEL(wild_read), 1, 32, 0, SIM_BOUNDS, NULL, 0},
    {KERNEL(dynamic_beyond), 1, 256, 1024, SIM_BOUNDS, NULL, 0},
    {KERNEL(static_beyond), 1, 32, 0, SIM_BOUNDS, NULL, 0},
    {KERNEL(dynamic_before), 1, 256, 1024, SIM_BOUNDS, NULL, 0},
    {KERNEL(static_far_beyond), 1, 256, 0, SIM_BOUNDS, NULL, 0},
    {KERNEL(misaligned_load), 1, 64, 0, SIM_ALIGNMENT, NULL, 0},
    {KERNEL(misaligned_store), 1, 64, 0, SIM_ALIGNMENT, NULL, 0},
    {KERNEL(misaligned_shared), 1, 32, 512, SIM_ALIGNMENT, NULL, 0},
    {KERNEL(some_at_barrier), 2, 256, 0, SIM_DEADLOCK, NULL, 0},
    {KERNEL(return_before_barrier), 1, 256, 0, SIM_DEADLOCK, NULL, 0},
    {KERNEL(some_at_shuffle), 1, 64, 0, SIM_DEADLOCK, NULL, 0},
    {KERNEL(barrier_and_shuffle), 1, 64, 0, SIM_DEADLOCK, NULL, 0},
    {KERNEL(shuffle_and_vote), 1, 32, 0, SIM_DEADLOCK, NULL, 0},
    {KERNEL(shuffle_from_nobody), 1, 16, 0, SIM_DEADLOCK, NULL, 0},
    {KERNEL(shuffle_in_part_of_warp), 1, 48, 0, SIM_DEADLOCK, NULL, 0},
    {KERNEL(blocks_write_one), 2, 64, 0, SIM_BLOCK_RACE, NULL, 0},
    {KERNEL(blocks_overlap), 8, 64, 0, SIM_BLOCK_RACE, NULL, 0},
    {KERNEL(block_reads_next), N / 64, 64, 0, SIM_BLOCK_RACE, NULL, 0},
    {KERNEL(atomic_and_plain), 3, 32, 0, SIM_BLOCK_RACE, NULL, 0},
    {KERNEL(last_block_writes), 16, 1, 0, SIM_BLOCK_RACE, NULL, 0},
    {KERNEL(any_block), 64, 1, 0, SIM_BLOCK_RACE, NULL, 0},
    {KERNEL(no_fence), 64, 1, 0, SIM_BLOCK_RACE, NULL, 0},
    {KERNEL(never_written), 3, 64, 256, SIM_KINDS, not_a_number, 192},
    {KERNEL(async_copy<false>), 1, 64, 2048, SIM_KINDS, not_a_number, 512},
    {KERNEL(async_no_barrier), 1, 64, 1024, SIM_SHARED_RACE, NULL, 0},
    {KERNEL(async_copy<true>), 1, 64, 2048, SIM_KINDS, async_result, 512},
    {KERNEL(reduce), N / 256, 256, 0, SIM_KINDS, reduced, N / 256},
    {KERNEL(transpose), dim3(2, 2), dim3(32, 8), 0, SIM_KINDS, transposed, N},
    {KERNEL(count), 4, 128, 0, SIM_KINDS, NULL, 0},
    {KERNEL(last_block), 64, 32, 0, SIM_KINDS, total, 1},
    {KERNEL(neighbours), 1, 256, 0, SIM_KINDS, same, 256},
    {KERNEL(whole_warps), 1, 256, 0, SIM_KINDS, same, 192},
    {"takes", NULL, 1, 32, 0, SIM_KINDS, same, 32},
    {KERNEL(two_bytes), 4, 33, 0, SIM_KINDS, two_of, 66},
    {KERNEL(segments), 1, 64, 0, SIM_KINDS, shuffled, 64},
    {KERNEL(corners), dim3(2, 3, 2), dim3(4, 3, 2), 0, SIM_KINDS, same, 288},
    {KERNEL(copies), N / 512, 64, 0, SIM_KINDS, same, N},
};
const size_t n_planted = sizeof planted / sizeof planted[0];

void planted_launch(const struct planted *p, struct device *dev, float *out, const float *in)
{
    if (p->kernel) {
        sim_launcher(p->name, p->grid, p->block, p->smem, cuda_stream(dev), p->kernel)(out, in);
    } else {
        launch_takes(dev, out, in);
    }
}
