// Machine files, what they make a model's operations cost, and costs as files.
#include "hete/machine.h"
#include "kernels/gpt.h"
#include "test/cmocka.h"
#include "test/scratch.h"
#include "test/tiny.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char text[] = "# a machine\n"
                           "name             My old box\n"
                           "device_memory_gb 8\n"
                           "host_memory_gb 32.5 # comment\n"
                           "pinned_memory_gb 20\n"
                           "bf16_tflops 100\n"
                           "fp32_tflops 10\n"
                           "efficiency 0.5\n"
                           "device_gb_per_s 500\n"
                           "launch_us 5\n"
                           "copy_latency_us 7\n"
                           "copy_in_gb_per_s 12\n"
                           "copy_out_gb_per_s 13\n"
                           "copy_in_duplex_gb_per_s 9\n"
                           "copy_out_duplex_gb_per_s 11\n"
                           "host_adam_gparams_per_s 1.5\n"
                           "host_gb_per_s 40\n"
                           "gpu_link_gb_per_s 0\n"
                           "gpu_link_latency_us 2\n"
                           "network_gb_per_s 25\n"
                           "network_latency_us 3\n";

static void assert_says(const char *message, const char *words)
{
    char copy[256];
    assert_null(strchr(message, '\n'));
    snprintf(copy, sizeof copy, "%s", words);
    for (char *word = strtok(copy, "~"); word; word = strtok(NULL, "~")) {
        if (!strstr(message, word)) {
            fail_msg("'%s' does not say '%s'", message, word);
        }
    }
}

static void assert_near(double a, double b, double relative)
{
    if (!(fabs(a - b) <= relative * fmax(fabs(a), fabs(b)))) {
        fail_msg("%.17g is not %.17g", a, b);
    }
}

static void reads(struct machine *m, const char *path)
{
    struct error err = {0};
    if (machine_read(m, path, &err)) {
        fail_msg("%s", err.text);
    }
}

static void every_value_reaches_its_field(void **state)
{
    (void)state;
    struct machine m;
    scratch_write("machine", text, strlen(text));
    reads(&m, scratch("machine"));
    assert_string_equal(m.name, "My old box");
    assert_int_equal(m.device_bytes, 8000000000);
    assert_int_equal(m.host_bytes, 32500000000);
    assert_int_equal(m.pinned_bytes, 20000000000);
    assert_true(m.peak_flops[DTYPE_BF16] == 100e12 && m.peak_flops[DTYPE_FP32] == 10e12);
    assert_true(m.efficiency == 0.5 && m.device_rate == 500e9);
    assert_near(m.launch_s, 5e-6, 1e-15);
    assert_near(m.link.latency_s, 7e-6, 1e-15);
    assert_true(m.link.in == 12e9 && m.link.out == 13e9);
    assert_true(m.link.in_duplex == 9e9 && m.link.out_duplex == 11e9);
    assert_true(m.host_adam == 1.5e9 && m.host_rate == 40e9 && m.gpu_link == 0);
    assert_true(m.network == 25e9 && m.gpus == 1);
    assert_near(m.gpu_link_latency_s, 2e-6, 1e-15);
    assert_near(m.network_latency_s, 3e-6, 1e-15);
}

// The text with one line replaced: what the message must say.
static const struct {
    const char *line, *instead, *words;
} refusals[] = {
    {"efficiency 0.5\n", "", "machine: missing: efficiency~FORMATS"},
    {"name             My old box\n", "", "missing: name"},
    {"name             My old box\n", "name\n", "machine:2: name: its value is missing"},
    {"My old box", "a name so long that it hardly fits the line, and certainly not the field",
     "longer than 63 bytes"},
    {"bf16_tflops 100\nfp32_tflops 10\n", "", "missing: bf16_tflops, fp32_tflops"},
    {"efficiency 0.5\n", "efficiency 0\n", "machine:8: efficiency 0 is out of range~0.001 to 1"},
    {"efficiency 0.5\n", "efficiency 1.01\n", "0.001 to 1"},
    {"efficiency 0.5\n", "efficiency 50%\n", "efficiency '50%' is not a number"},
    {"efficiency 0.5\n", "efficiency nan\n", "is not a number"},
    {"efficiency 0.5\n", "efficiency\n", "efficiency: expected one number~found 0 words"},
    {"efficiency 0.5\n", "efficiency 0.5 0.6\n", "found 2 words"},
    {"efficiency 0.5\n", "efficiency 0.5\nefficiency 0.5\n", "machine:9~twice, first in line 8"},
    {"efficiency 0.5\n", "efficiency 0.5\nspeed 3\n", "machine:9: 'speed' is not a name"},
    {"device_memory_gb 8\n", "device_memory_gb 0\n", "machine:3: device_memory_gb 0 is out of"},
    {"device_memory_gb 8\n", "device_memory_gb -8\n", "-8 is out of range"},
    {"device_memory_gb 8\n", "device_memory_gb 1000000001\n", "to 1000000000)"},
    {"device_memory_gb 8\n", "device_memory_gb 1e999\n", "out of range"},
    {"launch_us 5\n", "launch_us -1\n", "launch_us -1 is out of range"},
    {"copy_in_gb_per_s 12\n", "copy_in_gb_per_s 0\n", "machine:12~out of range"},
    {"copy_in_gb_per_s 12\n", "copy_in_gb_per_s 8\n",
     "copy_in_duplex_gb_per_s 9 is more than copy_in_gb_per_s 8"},
    {"copy_out_gb_per_s 13\n", "copy_out_gb_per_s 10\n", "copy_out_duplex_gb_per_s 11 is more"},
    {"pinned_memory_gb 20\n", "pinned_memory_gb 33\n",
     "pinned_memory_gb 33 is more than host_memory_gb 32.5"},
    {"host_adam_gparams_per_s 1.5\n", "host_adam_gparams_per_s 0\n", "out of range"},
    {"network_gb_per_s 25\n", "", "missing: network_gb_per_s"},
    {"network_gb_per_s 25\n", "network_gb_per_s -1\n", "network_gb_per_s -1 is out of range"},
    {"gpu_link_latency_us 2\n", "gpu_link_latency_us 1000001\n", "out of range~0 to 1000000"},
};

static void absurd_machines_are_refused_by_line(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        char changed[2048];
        struct machine m;
        struct error err = {0};
        const char *at = strstr(text, refusals[i].line);
        assert_non_null(at);
        snprintf(changed, sizeof changed, "%.*s%s%s", (int)(at - text), text, refusals[i].instead,
                 at + strlen(refusals[i].line));
        scratch_write("machine", changed, strlen(changed));
        if (machine_read(&m, scratch("machine"), &err) != STATUS_FAIL) {
            fail_msg("'%s' instead of '%s' was accepted", refusals[i].instead, refusals[i].line);
        }
        assert_says(err.text, refusals[i].words);
    }
    struct machine m;
    struct error err = {0};
    assert_int_equal(machine_read(&m, scratch("nothing"), &err), STATUS_FAIL);
    assert_says(err.text, "nothing~No such file");
}

static void the_machines_that_come_along_are_read(void **state)
{
    (void)state;
    static const char *const names[] = {"a100-40g", "rtx4090", "h100-80g", "h200"};
    if (access("scripts/machines", R_OK) != 0) {
        fprintf(stderr, "skip: scripts/machines is not in the working folder\n");
        skip();
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct machine m;
        char path[64];
        snprintf(path, sizeof path, "scripts/machines/%s", names[i]);
        reads(&m, path);
        assert_true(m.peak_flops[DTYPE_BF16] > m.peak_flops[DTYPE_FP32]);
        assert_true(m.link.in_duplex < m.link.out_duplex);
        assert_true(m.gpu_link > 0 && m.network > 0 && m.network_latency_s > m.gpu_link_latency_s);
        if (i == 0) {
            assert_int_equal(m.device_bytes, 40425000000);
            assert_true(m.host_adam == 3e9 && m.efficiency == 0.55);
        }
    }
}

static void the_documentation_names_every_field(void **state)
{
    (void)state;
    if (access("hete/FORMATS.md", R_OK) != 0) {
        fprintf(stderr, "skip: hete/FORMATS.md is not in the working folder\n");
        skip();
    }
    size_t bytes;
    char *formats = scratch_read("./hete/FORMATS.md", &bytes);
    for (const char *line = strchr(text, '\n') + 1; *line; line = strchr(line, '\n') + 1) {
        char name[64];
        snprintf(name, sizeof name, "`%.*s`", (int)strcspn(line, " "), line);
        if (!strstr(formats, name)) {
            fail_msg("hete/FORMATS.md does not name %s", name);
        }
    }
    free(formats);
}

// ---- costs of a model ---------------------------------------------------------------------------

static void open_gpt(struct gpt *gpt, size_t layers, size_t n)
{
    const struct gpt_config config = {.max_seq = 1024 / n,
                                      .vocab = 49152 / n,
                                      .layers = layers,
                                      .heads = 32,
                                      .hidden = 4096 / n,
                                      .head_rows = 256};
    gpt_open(gpt, &config);
}

static void operations_cost_what_their_work_takes(void **state)
{
    (void)state;
    struct machine m;
    struct gpt gpt;
    struct costs c;
    scratch_write("machine", text, strlen(text));
    reads(&m, scratch("machine"));
    open_gpt(&gpt, 3, 1);
    for (size_t dtype = 0; dtype < 2; dtype++) {
        for (size_t k = 1; k <= 2; k++) {
            struct step_shape shape = {.model = &gpt.model,
                                       .dtype = dtype,
                                       .B = 8,
                                       .T = 1024,
                                       .micro_batches = k,
                                       .train = true};
            double peak = dtype == DTYPE_BF16 ? 100e12 : 10e12, rate = 0.5 * peak;
            double h = 4096, BT = 8 * 1024, e = dtype == DTYPE_BF16 ? 2 : 4, g = k > 1 ? 4 : e;
            double P = 12 * h * h + 13 * h;
            machine_costs(&c, &m, &shape);
            double forward = (24 * BT * h * h + 2 * BT * 1024 * h) / rate; // PAPER's cost model
            assert_near(c.call[CALL_FORWARD][1], forward + 5e-6, 1e-12);
            assert_near(c.call[CALL_BACKWARD][1], 2 * forward + 5e-6, 1e-12);
            assert_true(c.call[CALL_RECOMPUTE][1] < c.call[CALL_FORWARD][1]);
            assert_near(c.call[CALL_HEAD][0], 6 * BT * h * 49152 / rate + 5e-6, 1e-12);
            assert_near(c.call[CALL_ENCODE][0], 3 * BT * h * e / 500e9 + 5e-6, 1e-12);
            assert_true(c.call[CALL_FORWARD][0] == 0 && c.call[CALL_HEAD][1] == 0);
            assert_true(c.call[CALL_DECODE][1] == 0 && c.call[CALL_LOGITS][0] == 0);
            assert_near(c.adam[1], P * (24 + g + (e == 2 ? e : 0)) / 500e9 + 5e-6, 1e-12);
            assert_near(c.accumulate[1], P * (8 + e) / 500e9 + 5e-6, 1e-12);
            assert_near(c.norm[1], P * g / 500e9 + 5e-6, 1e-12);
            assert_true(c.adam[0] > c.adam[1] / 2 && c.clip == m.launch_s);
            assert_near(c.host_adam, 1 / 1.5e9, 1e-12);
            assert_near(c.host_accumulate, (8 + e) / 40e9, 1e-12);
            assert_near(c.host_norm, 4 / 40e9, 1e-12);
            assert_memory_equal(&c.link, &m.link, sizeof c.link);
            assert_true(c.peak_flops == peak);
        }
    }
}

// Messages between all pairs, counted one by one: how long a GPU is busy with those to its own
// machine, and a machine's network with those of all its GPUs to others; and those of a ring.
static void messages_take_what_link_and_network_take(void **state)
{
    (void)state;
    struct machine m;
    struct gpt gpt;
    uint64_t rng = scratch_seed();
    scratch_write("machine", text, strlen(text));
    reads(&m, scratch("machine"));
    open_gpt(&gpt, 3, 4);
    m.gpu_link = 50e9;
    for (int round = 0; round < 50; round++) {
        size_t nodes = 1 + rng_below(&rng, 5);
        m.gpus = 1 + rng_below(&rng, 8);
        struct step_shape shape = {.model = &gpt.model,
                                   .dtype = DTYPE_BF16,
                                   .B = 1,
                                   .T = 256,
                                   .micro_batches = 1,
                                   .ranks = m.gpus * nodes,
                                   .train = true};
        struct costs c;
        machine_costs(&c, &m, &shape);
        for (size_t k = 0; k < 2; k++) {
            double bytes = 2 * (double)model_unit(&gpt.model, k)->params, link = 0, network = 0;
            double n = (double)shape.ranks, message = bytes / n;
            for (size_t to = 1; to < shape.ranks; to++) { // from rank 0
                link += to < m.gpus ? 2e-6 + message / 50e9 : 0;
                network += to < m.gpus ? 0 : 3e-6 + message * (double)m.gpus / 25e9;
            }
            if (shape.ranks == 1) {
                assert_true(c.gather[k] == 0 && c.scatter[k] == 0 && c.share == 0);
                continue;
            }
            double sum = bytes * (1 + 1 / n) / 500e9, ring = 0;
            for (size_t piece = 1; piece < shape.ranks; piece++) { // past the slowest place
                ring += fmax(m.gpus > 1 ? 2e-6 + message / 50e9 : 0,
                             nodes > 1 ? 3e-6 + message / 25e9 : 0);
            }
            assert_near(c.scatter[k], fmax(link, network) + sum + 1e-5, 1e-9);
            assert_near(c.gather[k], ring + 5e-6, 1e-9);
            assert_true(c.share > 0 && c.share < c.scatter[k]);
            assert_true(k == 0 || machine_waits_for_network(&m, &shape) == (network > link));
        }
        assert_near(c.host_adam, (double)m.gpus / 1.5e9, 1e-12); // they share the host
        assert_near(c.host_norm, (double)m.gpus * 4 / 40e9, 1e-12);
        assert_memory_equal(&c.link, &m.link, sizeof c.link);
    }
}

// A miniature of 1:16 on the machine as it sees it: every time, and every size of memory, is the
// original's divided by 256, but for biases, norms and such.
static void a_miniature_has_the_geometry_of_the_original(void **state)
{
    (void)state;
    struct machine m, mini;
    struct gpt gpt, small;
    struct costs c, d;
    struct error err = {0};
    size_t n;
    scratch_write("machine", text, strlen(text));
    reads(&m, scratch("machine"));
    char spec[300];
    snprintf(spec, sizeof spec, "%s:16", scratch("machine"));
    assert_int_equal(machine_read_emulated(&mini, spec, &n, &err), 0);
    assert_int_equal(n, 16);
    open_gpt(&gpt, 3, 1);
    open_gpt(&small, 3, 16);
    m.gpu_link = mini.gpu_link = 50e9;
    m.gpus = mini.gpus = 4;
    struct step_shape of = {.model = &gpt.model,
                            .dtype = DTYPE_BF16,
                            .B = 8,
                            .T = 1024,
                            .micro_batches = 1,
                            .ranks = 8,
                            .train = true};
    struct step_shape of_small = of;
    of_small.model = &small.model;
    of_small.T = 64;
    machine_costs(&c, &m, &of);
    machine_costs(&d, &mini, &of_small);
    for (size_t i = 0; i < CALLS; i++) {
        assert_near(d.call[i][0] * 256, c.call[i][0], 1e-6);
        assert_near(d.call[i][1] * 256, c.call[i][1], 1e-6);
    }
    for (size_t k = 0; k < 2; k++) {
        assert_near(d.adam[k] * 256, c.adam[k], 0.005);
        assert_near(d.norm[k] * 256, c.norm[k], 0.005);
        assert_near(d.accumulate[k] * 256, c.accumulate[k], 0.005);
        assert_near(d.scatter[k] * 256, c.scatter[k], 0.005);
        assert_near(d.gather[k] * 256, c.gather[k], 0.005);
    }
    assert_near(d.link.latency_s * 256, c.link.latency_s, 1e-12);
    assert_true(d.link.in == c.link.in && d.host_adam == c.host_adam);
    assert_int_equal(mini.device_bytes, m.device_bytes / 256);
    struct unit_bytes big = gpt.model.bytes(&gpt.model, DTYPE_BF16, 8, 1024);
    struct unit_bytes little = small.model.bytes(&small.model, DTYPE_BF16, 8, 64);
    assert_near((double)little.boundary * 256, (double)big.boundary, 1e-12);
    assert_near((double)little.kept * 256, (double)big.kept, 0.1); // 32 heads' statistics
}

static void what_is_emulated_is_a_file_and_a_scale(void **state)
{
    (void)state;
    struct machine m, same;
    struct error err = {0};
    size_t n;
    char spec[300];
    scratch_write("machine", text, strlen(text));
    scratch_write("od:d", text, strlen(text));
    scratch_write("od:7x", text, strlen(text));
    reads(&same, scratch("machine"));
    static const struct {
        const char *spec;
        size_t n;
    } good[] = {{"machine", 1}, {"machine:1", 1}, {"machine:1024", 1024},
                {"od:d", 1},    {"od:d:16", 16},  {"od:7x", 1}};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        if (machine_read_emulated(&m, scratch(good[i].spec), &n, &err)) {
            fail_msg("%s: %s", good[i].spec, err.text);
        }
        assert_int_equal(n, good[i].n);
        assert_int_equal(m.device_bytes, same.device_bytes / (n * n));
        assert_near(m.peak_flops[1] * (double)n, same.peak_flops[1], 1e-12);
    }
    static const char *const bad[] = {"machine:0", "machine:1025", "machine:99999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(machine_read_emulated(&m, scratch(bad[i]), &n, &err), STATUS_USAGE);
        assert_says(err.text, "--emulate~1:N~1 to 1024");
    }
    snprintf(spec, sizeof spec, "%s", scratch("machine:"));
    assert_int_equal(machine_read_emulated(&m, spec, &n, &err), STATUS_FAIL);
    assert_int_equal(machine_read_emulated(&m, scratch("none:16"), &n, &err), STATUS_FAIL);
    assert_says(err.text, "none~No such file");
}

// ---- costs as a file ----------------------------------------------------------------------------

static void costs_come_back_to_the_bit(void **state)
{
    (void)state;
    struct machine m;
    struct gpt gpt;
    struct costs costs, back;
    struct error err = {0};
    uint64_t rng = scratch_seed();
    scratch_write("machine", text, strlen(text));
    reads(&m, scratch("machine"));
    open_gpt(&gpt, 3, 1);
    struct step_shape shape = {
        .model = &gpt.model, .dtype = DTYPE_FP32, .B = 1, .T = 8, .micro_batches = 1, .ranks = 2};
    machine_costs(&costs, &m, &shape);
    for (int i = 0; i < 30; i++) {
        // Every number that is there gets random bits.
        for (double *x = (double *)&costs; x < (double *)(&costs + 1); x++) {
            *x = *x > 0 ? rng_unit(&rng) * pow(10, -9 * rng_unit(&rng)) : 0;
        }
        memset(&back, 0xff, sizeof back);
        if (costs_write(&costs, scratch("costs"), "any remark", &err) ||
            costs_read(&back, scratch("costs"), &err)) {
            fail_msg("%s", err.text);
        }
        assert_memory_equal(&costs, &back, sizeof costs);
    }
}

static void damaged_costs_are_refused(void **state)
{
    (void)state;
    struct costs costs = {0}, back;
    struct error err = {0};
    assert_int_equal(costs_write(&costs, scratch("costs"), NULL, &err), 0);
    size_t bytes;
    char *written = scratch_read("costs", &bytes);
    for (size_t n = 0; n + 1 < bytes; n += 7) { // cut anywhere
        scratch_write("costs", written, n);
        assert_int_equal(costs_read(&back, scratch("costs"), &err), STATUS_FAIL);
    }
    strstr(written, "forward_s 0")[10] = '-';
    scratch_write("costs", written, bytes);
    assert_int_equal(costs_read(&back, scratch("costs"), &err), STATUS_FAIL);
    assert_says(err.text, "costs:2: forward_s");
    free(written);
    assert_int_equal(machine_read(&(struct machine){0}, scratch("costs"), &err), STATUS_FAIL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_value_reaches_its_field),
        cmocka_unit_test(absurd_machines_are_refused_by_line),
        cmocka_unit_test(the_machines_that_come_along_are_read),
        cmocka_unit_test(the_documentation_names_every_field),
        cmocka_unit_test(operations_cost_what_their_work_takes),
        cmocka_unit_test(messages_take_what_link_and_network_take),
        cmocka_unit_test(a_miniature_has_the_geometry_of_the_original),
        cmocka_unit_test(what_is_emulated_is_a_file_and_a_scale),
        cmocka_unit_test(costs_come_back_to_the_bit),
        cmocka_unit_test(damaged_costs_are_refused),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
