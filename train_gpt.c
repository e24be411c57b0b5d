// train_gpt.c - trains a GPT on token shards: flags -> model -> plan -> device -> session ->
// training loop.
//
// This file only puts the parts together. What is computed is in kernels/, where and when it runs
// in hete/, what crosses the disk in data/. It builds a session and steps it; it calls no layer.
#include "data/checkpoint.h"
#include "data/corpus.h"
#include "data/evalset.h"
#include "data/files.h"
#include "data/log.h"
#include "data/options.h"
#include "data/shards.h"
#include "data/tokenizer.h"
#include "hete/build.h"
#include "hete/comm.h"
#include "hete/cores.h"
#include "hete/generate.h"
#include "hete/prepare.h"
#include "hete/recipe.h"
#include "hete/report.h"
#include "hete/session.h"
#include "hete/stream.h"
#include "hete/watch.h"
#include "kernels/clock.h"
#include "kernels/gpt.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#define VERSION "0.1"

#define AGREED_MAX ((size_t)256) // values that ranks compare

// A run stops when this many updates in a row were skipped because the norm was not finite.
#define MAX_BAD_STEPS 10

// A step between its start and its end.
struct asked {
    struct run *run;
    double lr, loss_z, norm_z;
    bool skip;
};

struct run {
    struct options o;
    FILE *say; // for people: stdout, or stderr when stdout carries JSON
    struct gpt gpt;
    struct prepared prepared; // the plan; if `planned`, also what it was made from
    bool planned;
    struct gpt one_block; // what is measured for the plan
    char identity[128], cache[PATH_MAX];
    struct comm *comm;         // the other ranks; NULL where one process does it
    size_t rank, ranks;        // rank 0 logs and writes; 0 of 1 without others
    bool stop, saves;          // what all ranks know: of a signal, of the first one's --out
    _Atomic uint64_t saved;    // step of the last checkpoint; the transport's thread reads it, too
    uint64_t loaded;           // hash of the parameters and moments that were read; 0: none were
    struct device *dev, *host; // host: the CPU's part of a step; NULL without a plan
    struct session *session;
    struct tokenizer *tokenizer; // NULL: tokens are printed as numbers
    struct loader *train, *val;  // val may be NULL
    struct evalset *evalset;     // NULL: none
    struct log log;
    struct dir_lock lock;
    struct state_file resumed; // fd -1: not a resumed run
    size_t B, T, micro_batches;
    uint64_t step, steps; // done, and of the whole run
    uint64_t started;     // steps; at most one more than done, for a while two
    struct asked asked[2];
    double finished_ms; // when the last step was
    struct watch watch; // if planned
    uint64_t updates;   // done by Adam: skipped ones do not count
    size_t bad_steps;   // in a row
    struct error late;  // the next step should be under way, but its data could not be had
    bool damaged;       // the parameters hold values that are not finite: not worth saving
    struct outlier loss_window, norm_window;
    double peak_flops;
    int32_t *tokens, *targets; // of one step
    float *losses;             // of one micro-batch
};

// ---- signals ------------------------------------------------------------------------------------

static volatile sig_atomic_t stop_signal;

static void on_signal(int sig)
{
    if (stop_signal) {
        _exit(128 + sig); // the second one: at once
    }
    stop_signal = sig;
}

static void catch_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL); // mpirun forwards this one at once, those never in time
    signal(SIGXFSZ, SIG_IGN);          // a file size limit is an error of write(), not a death
    signal(SIGPIPE, SIG_IGN);
}

// ---- ranks --------------------------------------------------------------------------------------

static void say_last_checkpoint(const struct run *run)
{
    if (run->o.out[0] && run->saved > 0) {
        fprintf(stderr, "train_gpt: the last checkpoint is that of step %llu, in %s: --resume\n",
                (unsigned long long)run->saved, run->o.out);
    }
}

// A rank is gone: nobody waits for it. On the transport's thread. All that are left say how to go
// on, for nobody knows who else is.
static void rank_is_gone(void *ctx, const struct error *err)
{
    fprintf(stderr, "train_gpt: %s\n", err->text);
    say_last_checkpoint(ctx);
    _exit(STATUS_FAIL);
}

static void say_notes(const struct run *run)
{
    for (int i = 0; i < run->o.note_count; i++) {
        fprintf(run->say, "note: %s\n", run->o.notes[i]);
    }
    if (run->ranks == 1 && run->o.gpus * run->o.nodes == 1 && run->o.zero > 0) {
        fprintf(run->say, "note: -z %lld (--zero): with one rank there is nothing to shard\n",
                (long long)run->o.zero);
    }
}

// What is emulated, or only planned for another machine, needs no GPU, unless it is asked for.
static bool stays_on_cpu(const struct options *o)
{
    return o->device == DEVICE_AUTO &&
           (o->emulate[0] || o->link_gb_per_s > 0 || (o->plan_only && o->machine[0]));
}

static int lock_out(struct run *run, struct error *err);

static int open_ranks(struct run *run, struct error *err)
{
    char why[sizeof err->text];
    bool gpus =
        !stays_on_cpu(&run->o) &&
        strcmp(device_kind(options_choice(&run->o, "device"), why, sizeof why), "cuda") == 0;
    struct comm_config config = {
        .gone = rank_is_gone, .ctx = run, .gpus = gpus, .dir = run->o.out[0] ? run->o.out : NULL};
    int rank;
    signal(SIGINT, SIG_DFL); // nothing is lost yet, and other ranks may be long in coming
    signal(SIGTERM, SIG_DFL);
    if ((comm_meets(gpus, &rank) && rank == 0 && lock_out(run, err)) ||
        comm_open(&run->comm, &config, err)) {
        return err->status;
    }
    catch_signals();
    run->rank = (size_t)comm_rank(run->comm);
    run->ranks = (size_t)comm_ranks(run->comm);
    run->o.device = run->ranks > 1 ? gpus ? DEVICE_CUDA : DEVICE_CPU : run->o.device;
    if (run->rank > 0 && !freopen("/dev/null", "w", stdout)) {
        return error_set(err, STATUS_FAIL, "rank %zu cannot be silenced", run->rank);
    }
    run->say = run->rank > 0 ? stdout : run->say;
    return STATUS_OK;
}

// Before anything computes: how many threads that is to be follows from the cores.
static int take_cores(struct run *run, struct error *err)
{
    struct options *o = &run->o;
    struct cores cores;
    if (run->ranks == 1) {
        return STATUS_OK;
    }
    if (cores_take(&cores, run->comm, err)) {
        return err->status;
    }
    fprintf(run->say, "cores: %s\n", cores.summary);
    if (cores.warning[0] && run->rank == 0) {
        fprintf(stderr, "warning: %s\n", cores.warning);
    }
    if (!getenv("OMP_NUM_THREADS")) {
        o->threads = o->threads ? o->threads : (int64_t)cores.threads;
        o->host_threads = o->host_threads ? o->host_threads : (int64_t)cores.threads;
    }
    return STATUS_OK;
}

// For the message about a rank that is gone.
static void say_doing(const struct run *run, const char *what)
{
    char doing[64];
    snprintf(doing, sizeof doing, "%s %llu", what, (unsigned long long)run->step);
    comm_doing(run->comm, COMM_MAIN, doing);
}

// A signal may reach some ranks only, and at different times: they stop after the same step. While
// steps are in flight it is their result that tells.
static int agree_to_stop(struct run *run, struct error *err)
{
    struct {
        bool stop, saves;
    } mine = {stop_signal != 0, run->o.out[0]}, all[run->ranks];
    if (comm_all_gather(run->comm, &mine, all, sizeof mine, err)) {
        return err->status;
    }
    run->stop = false;
    for (size_t r = 0; r < run->ranks; r++) {
        run->stop |= all[r].stop;
    }
    run->saves = all[0].saves;
    return STATUS_OK;
}

// Options, as lines `name=value`, and what else is in `values` already.
static int agree_with_options(struct run *run, char *options, struct comm_value *values, size_t n,
                              struct error *err)
{
    char *line;
    while ((line = strtok_r(options, "\n", &options)) && n < AGREED_MAX) {
        char *value = strchr(line, '=');
        values[n++] = (struct comm_value){line, value ? value + 1 : ""};
        line[value ? (size_t)(value - line) : strlen(line)] = 0;
    }
    return comm_agree(run->comm, values, n, err);
}

// Before anything is done together, or a rank would wait for what others have not been told to do.
static int agree_to_start(struct run *run, struct error *err)
{
    static char options[OPTIONS_ALIKE_MAX];
    static struct comm_value values[AGREED_MAX];
    char build[256];
    build_identity(build, sizeof build);
    values[0] = (struct comm_value){"the version", VERSION};
    values[1] = (struct comm_value){"the build", build};
    options_alike(&run->o, options, sizeof options);
    return agree_with_options(run, options, values, 2, err);
}

// All plan with the same costs and budgets, but a file of the same name may hold something else
// elsewhere.
static int agree_on_plan(struct run *run, struct error *err)
{
    char *text;
    size_t bytes;
    if (plan_text(&run->prepared.plan, &text, &bytes, err)) {
        return err->status;
    }
    for (char *end = text; (end = strchr(end, '\n'));) {
        *end = ',';
    }
    struct comm_value value = {"the plan", text};
    int status = comm_agree(run->comm, &value, 1, err);
    free(text);
    return status;
}

// What the options have become. Before costs are measured, where ranks talk about the units of
// their model; and how long samples are depends on the tokenizer.
static int agree_on_model(struct run *run, struct comm_value *values, size_t n, struct error *err)
{
    static char options[OPTIONS_SAVED_MAX];
    char tokenizer[32] = "none";
    if (run->tokenizer) {
        snprintf(tokenizer, sizeof tokenizer, "%016llx",
                 (unsigned long long)tokenizer_hash(run->tokenizer));
    }
    values[n++] = (struct comm_value){"the tokenizer", tokenizer};
    options_save(&run->o, options, sizeof options);
    return agree_with_options(run, options, values, n, err);
}

// What follows from files that may be others elsewhere. The number of collectives of a validation
// depends on its data.
static int agree_on_files(struct run *run, struct error *err)
{
    static struct comm_value values[AGREED_MAX];
    char resumed[32] = "none", data[32], val[32] = "none", examples[32];
    if (run->resumed.fd >= 0) {
        snprintf(resumed, sizeof resumed, "of step %llu", (unsigned long long)run->resumed.step);
    }
    if (run->val) {
        snprintf(val, sizeof val, "%016llx", (unsigned long long)loader_fingerprint(run->val));
    }
    snprintf(data, sizeof data, "%016llx", (unsigned long long)loader_fingerprint(run->train));
    snprintf(examples, sizeof examples, "%zu", run->evalset ? evalset_count(run->evalset) : 0);
    values[0] = (struct comm_value){"the checkpoint", resumed};
    values[1] = (struct comm_value){"the training data", data};
    values[2] = (struct comm_value){"the validation data", val};
    values[3] = (struct comm_value){"the number of --eval's examples", examples};
    return agree_on_model(run, values, 4, err);
}

// What has to be the same everywhere, or the sums would be of different things.
static int agree_to_train(struct run *run, struct error *err)
{
    char state[32], graph[32];
    snprintf(state, sizeof state, "%016llx", (unsigned long long)run->loaded);
    snprintf(graph, sizeof graph, "%016llx",
             (unsigned long long)graph_hash(session_graph(run->session)));
    struct comm_value values[] = {{"the instruction set", run->dev->isa},
                                  {"the content of the model file or checkpoint", state},
                                  {"the operations of a step", graph}};
    return comm_agree(run->comm, values, sizeof values / sizeof *values, err);
}

// ---- parameters, moments and files --------------------------------------------------------------

// Which unit holds an element of a model file.
static struct span file_span(const void *ctx, size_t first)
{
    const struct gpt *gpt = ctx;
    for (size_t i = 0; i < gpt_spans(gpt); i++) {
        struct gpt_span t = gpt_span(gpt, i);
        if (first < t.tensor->elems) {
            return (struct span){t.unit, t.tensor->offset + first, t.tensor->elems - first};
        }
        first -= t.tensor->elems;
    }
    return (struct span){.elems = SIZE_MAX}; // behind the end: never asked for
}

static struct stream stream_of(const struct run *run, enum state state)
{
    return (struct stream){.session = run->session,
                           .state = state,
                           .span = file_span,
                           .ctx = &run->gpt,
                           .comm = run->ranks > 1 ? run->comm : NULL};
}

// The parameters, for a file of the dtype that its header says. Free .fp32.
static int open_stream(struct stream *s, const struct run *run, const struct model_header *h,
                       struct error *err)
{
    *s = stream_of(run, STATE_PARAMS);
    s->fp32 = h->version == MODEL_BF16 ? malloc(2 * (size_t)CHECKPOINT_CHUNK) : NULL;
    if (h->version == MODEL_BF16 && !s->fp32) {
        return error_set(err, STATUS_FAIL, "no memory to convert a model file");
    }
    return STATUS_OK;
}

static struct model_header header_of(const struct run *run)
{
    const struct gpt_config *c = &run->gpt.config;
    return (struct model_header){
        .version = run->o.dtype == CHOICE_BF16 ? MODEL_BF16 : MODEL_FP32,
        .max_seq = (uint32_t)c->max_seq,
        .vocab = (uint32_t)c->vocab,
        .layers = (uint32_t)c->layers,
        .heads = (uint32_t)c->heads,
        .hidden = (uint32_t)c->hidden,
        .padded_vocab = (uint32_t)gpt_padded_vocab(c),
    };
}

// What is read is not only taken, but can be compared among the ranks.
struct taking {
    struct run *run;
    struct stream stream;
};

static int take(void *ctx, void *file, size_t first, size_t n, struct error *err)
{
    struct taking *t = ctx;
    size_t width = t->stream.fp32 ? sizeof(uint16_t) : sizeof(float);
    t->run->loaded = XXH3_64bits_withSeed(file, n * width, t->run->loaded);
    return stream_take(&t->stream, file, first, n, err);
}

static int load_model_file(struct run *run, struct error *err)
{
    struct model_header h;
    struct taking t = {.run = run};
    if (model_read_header(run->o.model, &h, err) || open_stream(&t.stream, run, &h, err)) {
        return err->status;
    }
    int status = model_read(run->o.model, &h, take, &t, err);
    free(t.stream.fp32);
    return status;
}

static int init_parameters(struct run *run, struct error *err)
{
    size_t piece = CHECKPOINT_CHUNK / sizeof(float);
    float *buf = malloc(CHECKPOINT_CHUNK);
    if (!buf) {
        return error_set(err, STATUS_FAIL, "no memory to initialise the model");
    }
    for (size_t u = 0; u < run->gpt.model.units; u++) {
        size_t n = model_unit(&run->gpt.model, u)->params;
        for (size_t i = 0; i < n; i += piece) {
            size_t m = n - i < piece ? n - i : piece;
            gpt_init(&run->gpt, (uint64_t)run->o.seed, u, i, buf, m);
            session_write(run->session, STATE_PARAMS, u, i, buf, m);
        }
    }
    free(buf);
    return session_moved(run->session, err);
}

static void put_numbers(const struct run *run, struct numbers *n)
{
    struct loader_state at = loader_tell(run->train);
    numbers_clear(n);
    numbers_put_u64(n, "step", run->step);
    numbers_put_u64(n, "updates", run->updates);
    numbers_put_u64(n, "epoch", at.epoch);
    numbers_put_u64(n, "row", at.row);
    numbers_put_u64(n, "data", loader_fingerprint(run->train));
    numbers_put_f64(n, "loss_window", run->loss_window.value, OUTLIER_WINDOW);
    numbers_put_f64(n, "loss_count", &run->loss_window.count, 1);
    numbers_put_f64(n, "norm_window", run->norm_window.value, OUTLIER_WINDOW);
    numbers_put_f64(n, "norm_count", &run->norm_window.count, 1);
}

static int write_checkpoint(struct run *run, struct error *err)
{
    static char options[OPTIONS_SAVED_MAX];
    static struct numbers numbers;
    struct model_header h = header_of(run);
    struct stream params, master = stream_of(run, STATE_PARAMS);
    struct stream m = stream_of(run, STATE_M), v = stream_of(run, STATE_V);
    const char *dir = run->o.out;
    char path[PATH_MAX];
    if (open_stream(&params, run, &h, err)) {
        return err->status;
    }
    log_clear_bar(&run->log);
    model_path(path, dir, run->step);
    int status = model_write(path, &h, stream_give, &params, err);
    free(params.fp32);
    if (status) {
        return status;
    }
    put_numbers(run, &numbers);
    size_t elems = model_elems(&h), length = options_save(&run->o, options, sizeof options);
    struct state_part parts[] = {
        {.name = "options", .dtype = SECTION_BYTES, .elems = length, .data = options},
        {.name = "run", .dtype = SECTION_BYTES, .elems = numbers.bytes, .data = numbers.text},
        {.name = "master",
         .dtype = SECTION_FP32,
         .elems = elems,
         .source = stream_give,
         .ctx = &master},
        {.name = "m", .dtype = SECTION_FP32, .elems = elems, .source = stream_give, .ctx = &m},
        {.name = "v", .dtype = SECTION_FP32, .elems = elems, .source = stream_give, .ctx = &v},
    };
    h.version = MODEL_FP32;
    state_path(path, dir, run->step);
    if (state_write(path, run->step, &h, parts, sizeof parts / sizeof *parts, err) ||
        checkpoint_done(dir, run->step, err)) {
        return err->status;
    }
    run->saved = run->step;
    return checkpoint_prune(dir, run->step, (uint64_t)run->o.keep, (uint64_t)run->o.major_every,
                            err);
}

// The first rank writes, the others give it what they hold.
static int save_checkpoint(struct run *run, struct error *err)
{
    struct error later;
    bool whole;
    int status;
    say_doing(run, "checkpoint of step");
    if (run->rank > 0) {
        status = stream_follow(run->session, run->comm, &whole, err);
        run->saved = whole ? run->step : run->saved;
        return status;
    }
    status = write_checkpoint(run, err);
    whole = run->saved == run->step;
    if (run->ranks > 1 && stream_done(run->comm, whole, status ? &later : err) && !status) {
        status = err->status;
    }
    return status;
}

// Position in the data: where the state says, if the data is what it was.
static int seek_data(struct run *run, const struct numbers *n, struct error *err)
{
    uint64_t fingerprint;
    struct loader_state at;
    if (numbers_get_u64(n, "epoch", &at.epoch, err) || numbers_get_u64(n, "row", &at.row, err) ||
        numbers_get_u64(n, "data", &fingerprint, err)) {
        return err->status;
    }
    if (fingerprint != loader_fingerprint(run->train) || at.row >= loader_rows(run->train)) {
        fprintf(run->say,
                "resume: --train %s is not the data that the checkpoint was trained on; "
                "starting at its first row\n",
                run->o.train);
        at = (struct loader_state){0, 0};
    }
    return loader_seek(run->train, at, err);
}

static int load_state(struct run *run, struct error *err)
{
    static struct numbers n;
    struct state_file *f = &run->resumed;
    struct model_header h = header_of(run);
    size_t elems = model_elems(&h);
    struct taking p = {run, stream_of(run, STATE_PARAMS)};
    struct taking m = {run, stream_of(run, STATE_M)}, v = {run, stream_of(run, STATE_V)};
    if (state_read_numbers(f, "run", &n, err) || numbers_get_u64(&n, "step", &run->step, err) ||
        numbers_get_u64(&n, "updates", &run->updates, err) ||
        numbers_get_f64(&n, "loss_window", run->loss_window.value, OUTLIER_WINDOW, err) ||
        numbers_get_f64(&n, "loss_count", &run->loss_window.count, 1, err) ||
        numbers_get_f64(&n, "norm_window", run->norm_window.value, OUTLIER_WINDOW, err) ||
        numbers_get_f64(&n, "norm_count", &run->norm_window.count, 1, err) ||
        seek_data(run, &n, err) || state_read(f, "master", SECTION_FP32, elems, take, &p, err) ||
        state_read(f, "m", SECTION_FP32, elems, take, &m, err) ||
        state_read(f, "v", SECTION_FP32, elems, take, &v, err)) {
        return err->status;
    }
    state_close(f);
    return STATUS_OK;
}

// ---- start: options -> model -> data -> device -> session ---------------------------------------

// The directory is this run's alone before anything in it is read, and writable before the first
// step, not at the first checkpoint. A resume does not make one: that there is none is its error.
static int lock_out(struct run *run, struct error *err)
{
    const char *dir = run->o.out;
    bool locked = run->lock.fd >= 0; // where ranks have met in it
    if (!dir[0] || locked || (run->o.resume && !run->o.begin_if_none && access(dir, F_OK) != 0)) {
        return STATUS_OK;
    }
    if (dir_make(dir, err) || dir_writable(dir, err) || dir_lock(&run->lock, dir, err)) {
        return err->status;
    }
    return STATUS_OK;
}

// What is written at the end can be written: found now, not then.
static int check_outputs(const struct run *run, struct error *err)
{
    const struct options *o = &run->o;
    const struct {
        const char *name, *path;
    } outputs[] = {{"save-plan", o->save_plan}, {"trace", o->trace}, {"timeline", o->timeline}};
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
        struct error why;
        if (outputs[i].path[0] && file_writable(outputs[i].path, &why)) {
            return error_set(err, why.status, "--%s: %s", outputs[i].name, why.text);
        }
        for (size_t j = 0; j < i; j++) {
            if (outputs[i].path[0] && strcmp(outputs[i].path, outputs[j].path) == 0) {
                return error_set(err, STATUS_USAGE, "--%s and --%s both are to write %s",
                                 outputs[j].name, outputs[i].name, outputs[i].path);
            }
        }
    }
    return STATUS_OK;
}

static int check_room(struct run *run, struct error *err)
{
    struct model_header h = header_of(run);
    return run->rank == 0 && run->o.out[0]
               ? checkpoint_room(run->o.out, &h, (uint64_t)run->o.keep, err)
               : STATUS_OK;
}

static void say_refused(void *ctx, const char *path, const char *reason)
{
    (void)ctx;
    (void)path; // the reason names it
    fprintf(stderr, "resume: refused: %s; looking for an older one\n", reason);
}

static void say_differs(void *ctx, const char *name, const char *saved, const char *given)
{
    struct run *run = ctx;
    fprintf(run->say, "resume: --%s is %s now, was %s\n", name, given, saved);
}

// Finds the newest good state in --out, and takes from it the options that were not given. llm.c's
// run scripts say -y from the first run on, so with it there may be no checkpoint yet; but one that
// is damaged is never passed over for a new run.
static int begin_resume(struct run *run, struct error *err)
{
    static char text[OPTIONS_SAVED_MAX];
    size_t length;
    if (run->o.begin_if_none && !state_any(run->o.out)) {
        fprintf(run->say, "resume: no checkpoint in %s yet; starting from the beginning\n",
                run->o.out);
        return STATUS_OK;
    }
    if (state_open_newest(&run->resumed, run->o.out, say_refused, run, err) ||
        state_read_bytes(&run->resumed, "options", text, sizeof text, &length, err) ||
        options_merge(&run->o, text, length, say_differs, run, err)) {
        return err->status;
    }
    fprintf(run->say, "resume: %s, step %llu\n", run->resumed.path,
            (unsigned long long)run->resumed.step);
    return STATUS_OK;
}

static void set_shape(struct gpt_config *c, const struct model_header *h)
{
    c->max_seq = h->max_seq;
    c->vocab = h->vocab;
    c->layers = h->layers;
    c->heads = h->heads;
    c->hidden = h->hidden;
}

static bool is_file(const char *path)
{
    return strchr(path, '/') || strchr(path, '.') || access(path, F_OK) == 0;
}

// An option given for a shape that a file has already settled must say the same.
static int hold_shape(const struct run *run, const char *name, int64_t value, size_t settled,
                      const char *where, struct error *err)
{
    if (options_given(&run->o, name) && value != OPTION_AUTO && (size_t)value != settled) {
        return error_set(err, STATUS_USAGE,
                         "--%s %lld: %s has %zu, and a trained model cannot change its shape", name,
                         (long long)value, where, settled);
    }
    return STATUS_OK;
}

static int shape_from_file(struct run *run, struct gpt_config *c, const struct model_header *h,
                           const char *where, struct error *err)
{
    const struct options *o = &run->o;
    set_shape(c, h);
    if (hold_shape(run, "layers", o->layers, c->layers, where, err) ||
        hold_shape(run, "hidden", o->hidden, c->hidden, where, err) ||
        hold_shape(run, "heads", o->heads, c->heads, where, err) ||
        hold_shape(run, "vocab", o->vocab, c->vocab, where, err) ||
        hold_shape(run, "max-seq", o->max_seq, c->max_seq, where, err)) {
        return err->status;
    }
    return STATUS_OK;
}

// A --model that is given on resume must have the shape that is resumed.
static int check_resumed_model(struct run *run, const struct gpt_config *c, struct error *err)
{
    struct gpt_config other = *c;
    struct model_header h;
    if (!options_given(&run->o, "model")) {
        return STATUS_OK;
    }
    if (is_file(run->o.model)) {
        if (model_read_header(run->o.model, &h, err)) {
            return err->status;
        }
        set_shape(&other, &h);
    } else if (gpt_parse(&other, run->o.model, err)) {
        return err->status;
    }
    if ((other.layers != c->layers && !options_given(&run->o, "layers")) ||
        (other.hidden != c->hidden && !options_given(&run->o, "hidden")) ||
        (other.heads != c->heads && !options_given(&run->o, "heads"))) {
        return error_set(err, STATUS_USAGE,
                         "--model %s has %zu layers, %zu channels, %zu heads; the checkpoint %s "
                         "has %zu, %zu, %zu, and a resumed model cannot change its shape",
                         run->o.model, other.layers, other.hidden, other.heads, run->resumed.path,
                         c->layers, c->hidden, c->heads);
    }
    return STATUS_OK;
}

static int shape_from_options(struct run *run, struct gpt_config *c, struct error *err)
{
    const struct options *o = &run->o;
    if (gpt_parse(c, o->model, err)) {
        return err->status;
    }
    c->layers = o->layers == OPTION_AUTO ? c->layers : (size_t)o->layers;
    c->hidden = o->hidden == OPTION_AUTO ? c->hidden : (size_t)o->hidden;
    c->heads = o->heads == OPTION_AUTO ? c->heads : (size_t)o->heads;
    c->vocab = o->vocab != OPTION_AUTO ? (size_t)o->vocab
               : run->tokenizer        ? tokenizer_vocab(run->tokenizer)
                                       : GPT2_VOCAB;
    if (o->max_seq != OPTION_AUTO) {
        c->max_seq = (size_t)o->max_seq;
    } else if (o->seq > (int64_t)c->max_seq) {
        c->max_seq = (size_t)o->seq; // a longer --seq is a model with more positions
    }
    return STATUS_OK;
}

#define CUDA_HEAD_ROWS 2048 // a GPU is idle with the 256 that suit a CPU's caches

// Settles where to compute and, if it was not asked for, in which dtype.
static void choose_device(struct run *run)
{
    struct options *o = &run->o;
    char why[512] = "";
    if (o->device == DEVICE_AUTO) {
        const char *kind = stays_on_cpu(o) ? "cpu" : device_kind("auto", why, sizeof why);
        o->device = strcmp(kind, "cuda") == 0 ? DEVICE_CUDA : DEVICE_CPU;
    }
    if (why[0]) {
        fprintf(stderr, "training on the CPU: %s\n", why);
    }
    if (o->device == DEVICE_CUDA && run->resumed.fd < 0) {
        o->dtype = options_given(o, "dtype") ? o->dtype : CHOICE_BF16;
        o->head_rows = options_given(o, "head-rows") ? o->head_rows : CUDA_HEAD_ROWS;
    }
}

// Settles the model's shape and writes it back into the options, where a checkpoint saves it.
static int choose_model(struct run *run, struct error *err)
{
    struct options *o = &run->o;
    struct gpt_config c = {.head_rows = (size_t)o->head_rows};
    struct model_header h;
    if (run->resumed.fd >= 0) {
        if (shape_from_file(run, &c, &run->resumed.shape, run->resumed.path, err) ||
            check_resumed_model(run, &c, err)) {
            return err->status;
        }
    } else if (is_file(o->model)) {
        if (model_read_header(o->model, &h, err) || shape_from_file(run, &c, &h, o->model, err)) {
            return err->status;
        }
        o->dtype = options_given(o, "dtype") ? o->dtype
                   : h.version == MODEL_BF16 ? CHOICE_BF16
                                             : CHOICE_FP32;
    } else if (shape_from_options(run, &c, err)) {
        return err->status;
    }
    if (gpt_check(&c, err)) {
        return err->status;
    }
    o->layers = (int64_t)c.layers;
    o->hidden = (int64_t)c.hidden;
    o->heads = (int64_t)c.heads;
    o->vocab = (int64_t)c.vocab;
    o->max_seq = (int64_t)c.max_seq;
    gpt_open(&run->gpt, &c);
    h = header_of(run);
    return model_check(&h, "the model", err);
}

// Rows of a micro-batch, tokens of a row, micro-batches of a step.
static int choose_batch(struct run *run, struct error *err)
{
    struct options *o = &run->o;
    if (o->seq == OPTION_AUTO) {
        o->seq = o->max_seq < 1024 ? o->max_seq : 1024;
    }
    if (o->seq > o->max_seq) {
        return error_set(err, STATUS_USAGE,
                         "--seq %lld: the model has positions for %lld tokens; --seq at most "
                         "that, or a model with a larger --max-seq",
                         (long long)o->seq, (long long)o->max_seq);
    }
    bool choose = o->micro_batch == OPTION_AUTO; // the planner will
    if (choose && o->total_batch == OPTION_AUTO) {
        return error_set(err, STATUS_USAGE,
                         "--micro-batch auto: give --total-batch, the tokens of a step, which it "
                         "is to divide");
    }
    int64_t ranks = (int64_t)run->ranks, micro = ranks * (choose ? 1 : o->micro_batch) * o->seq;
    if (o->total_batch == OPTION_AUTO) {
        o->total_batch = micro;
    }
    if (o->total_batch % micro != 0 && choose) {
        return error_set(err, STATUS_USAGE,
                         "--total-batch %lld is not a multiple of --seq %lld x %lld ranks = %lld "
                         "tokens",
                         (long long)o->total_batch, (long long)o->seq, (long long)ranks,
                         (long long)micro);
    }
    if (o->total_batch % micro != 0) {
        return error_set(err, STATUS_USAGE,
                         "--total-batch %lld is not a multiple of --micro-batch %lld x --seq %lld "
                         "x %lld ranks = %lld tokens",
                         (long long)o->total_batch, (long long)o->micro_batch, (long long)o->seq,
                         (long long)ranks, (long long)micro);
    }
    run->B = choose ? 0 : (size_t)o->micro_batch;
    run->T = (size_t)o->seq;
    run->micro_batches = choose ? 0 : (size_t)(o->total_batch / micro);
    return STATUS_OK;
}

// The validation data that belongs to --train: its pattern with "val" for "train", where such
// files are.
static void guess_val(struct run *run)
{
    struct options *o = &run->o;
    char *at = strstr(o->train, "_train");
    if (!options_given(o, "train") || options_given(o, "val") || run->resumed.fd >= 0) {
        return;
    }
    o->val[0] = 0;
    if (at && strlen(o->train) < sizeof o->val) {
        snprintf(o->val, sizeof o->val, "%.*s_val%s", (int)(at - o->train), o->train,
                 at + strlen("_train"));
    }
}

static int open_data(struct run *run, struct error *err)
{
    struct options *o = &run->o;
    uint32_t vocab = (uint32_t)run->gpt.config.vocab;
    bool guessed = options_given(o, "train") && !options_given(o, "val");
    if (loader_open(&run->train, o->train, run->T, vocab, (uint64_t)o->seed, !o->overfit_batch,
                    err)) {
        return err->status;
    }
    if (o->val_every > 0 && o->val[0] &&
        loader_open(&run->val, o->val, run->T, vocab, 0, false, err)) {
        if (!guessed) {
            return err->status;
        }
        run->val = NULL;
        o->val[0] = 0;
    }
    if (o->val_every > 0 && !run->val) {
        fprintf(run->say, "no validation: --val names no shards%s\n",
                guessed ? " and none lie beside --train" : "");
    }
    if (o->eval[0] && evalset_open(&run->evalset, o->eval, run->T, vocab, err)) {
        return err->status;
    }
    uint64_t rows = (uint64_t)(o->total_batch / o->seq);
    if (o->steps == OPTION_AUTO) {
        o->steps = (int64_t)(loader_rows(run->train) / rows);
        if (o->steps == 0) {
            return error_set(err, STATUS_FAIL,
                             "%s holds %llu rows of %zu tokens, less than one step of %llu: give "
                             "--steps, or a smaller --total-batch",
                             o->train, (unsigned long long)loader_rows(run->train), run->T,
                             (unsigned long long)rows);
        }
    }
    run->steps = (uint64_t)o->steps;
    return STATUS_OK;
}

static struct device_config device_config(const struct run *run)
{
    return (struct device_config){
        .kind = options_choice(&run->o, "device"),
        .index = run->comm ? comm_gpu(run->comm) : 0,
        .dtype = run->o.dtype == CHOICE_BF16 ? DTYPE_BF16 : DTYPE_FP32,
        .threads = (int)run->o.threads,
        .head_size = gpt_head_size(&run->gpt.config),
        .max_seq = run->gpt.config.max_seq,
        .padded_vocab = gpt_padded_vocab(&run->gpt.config),
    };
}

static int open_device(struct run *run, const struct device_config *config, struct error *err)
{
    struct device_config host = device_config(run);
    host.kind = "cpu";
    host.threads = (int)run->o.host_threads;
    if (device_open(&run->dev, config, err) ||
        (run->planned && device_open(&run->host, &host, err))) {
        return err->status;
    }
    if (run->comm) {
        comm_use_device(run->comm, run->dev);
    }
    fprintf(run->say, "device: %s, %s\n", run->dev->summary, options_choice(&run->o, "dtype"));
    if (run->dev->warning[0]) {
        fprintf(stderr, "warning: %s\n", run->dev->warning);
    }
    if (run->host && run->o.host_threads > 0 && run->host->warning[0]) {
        fprintf(stderr, "warning: --host-threads: %s\n", run->host->warning);
    }
    return STATUS_OK;
}

static int open_session(struct run *run, const struct session_config *config, struct error *err)
{
    size_t tokens = config->B * config->T * config->micro_batches;
    run->tokens = malloc(tokens * sizeof *run->tokens);
    run->targets = malloc(tokens * sizeof *run->targets);
    run->losses = malloc(config->B * config->T * sizeof *run->losses);
    if (!run->tokens || !run->targets || !run->losses) {
        return error_set(err, STATUS_FAIL, "no memory for a batch of %zu tokens", tokens);
    }
    return session_open(&run->session, run->dev, &run->gpt.model, config, err);
}

// ---- start: the plan ----------------------------------------------------------------------------

// Where measured costs are kept: the user's cache directory. "": nowhere.
static void cache_directory(char *out, size_t size)
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n = cache && *cache ? snprintf(out, size, "%s/train_gpt", cache)
            : home && *home ? snprintf(out, size, "%s/.cache/train_gpt", home)
                            : 0;
    if (n <= 0 || (size_t)n >= size) {
        out[0] = 0;
    }
}

// Without any of these nothing is planned: everything is on a device that has no cap.
static bool wants_plan(const struct run *run)
{
    const struct options *o = &run->o;
    return o->device_memory != OPTION_AUTO || o->machine[0] || o->emulate[0] || o->plan[0] ||
           options_given(o, "policy") || o->speculate || o->save_plan[0] ||
           o->micro_batch == OPTION_AUTO || o->report > 0 || o->trace[0] || o->timeline[0] ||
           o->plan_only || (run->ranks > 1 && o->zero > 0);
}

static size_t bytes_given(int64_t bytes)
{
    return bytes == OPTION_AUTO ? 0 : (size_t)bytes;
}

static struct prepare_config prepare_config(struct run *run)
{
    const struct options *o = &run->o;
    struct gpt_config one = run->gpt.config;
    one.layers = 1;
    gpt_open(&run->one_block, &one);
    cache_directory(run->cache, sizeof run->cache);
    snprintf(run->identity, sizeof run->identity,
             "gpt C%zu heads %zu vocab %zu positions %zu rows %zu", one.hidden, one.heads,
             one.vocab, one.max_seq, one.head_rows);
    return (struct prepare_config){
        .model = &run->gpt.model,
        .one_block = &run->one_block.model,
        .device = device_config(run),
        .host_threads = (int)o->host_threads,
        .B = run->B,
        .T = run->T,
        .rows = (size_t)(o->total_batch / o->seq) / run->ranks,
        .hold_updates = o->clip > 0 || !o->no_guard || o->skip_loss_z > 0 || o->skip_norm_z > 0,
        .speculate = o->speculate,
        .device_memory = bytes_given(o->device_memory),
        .host_memory = bytes_given(o->host_memory),
        .pinned_memory = bytes_given(o->pinned_memory),
        .link_gb_per_s = o->link_gb_per_s,
        .machine = o->machine,
        .emulate = o->emulate,
        .policy = o->policy,
        .plan = o->plan,
        .zero = (int)o->zero,
        .fast_reduce = o->fast_reduce,
        .comm = run->comm,
        .gpus = (size_t)o->gpus,
        .nodes = (size_t)o->nodes,
        .cache = run->cache[0] ? run->cache : NULL,
        .identity = run->identity,
    };
}

static int make_plan(struct run *run, struct error *err)
{
    struct prepared *p = &run->prepared;
    struct prepare_config config = prepare_config(run);
    run->planned = wants_plan(run) || run->o.device == DEVICE_CUDA;
    if (run->planned ? prepare(p, &config, err) : prepare_resident(p, &config, err)) {
        return err->status;
    }
    if (run->comm && agree_on_plan(run, err)) {
        return err->status;
    }
    run->B = p->plan.B;
    run->micro_batches = p->plan.micro_batches;
    run->o.micro_batch = (int64_t)run->B;
    if (run->rank == 0 && run->o.save_plan[0] && plan_write(&p->plan, run->o.save_plan, err)) {
        return err->status;
    }
    return STATUS_OK;
}

// A miniature of --emulate FILE:N stands for a model that is N times as wide and as long.
static void print_miniature(const struct run *run)
{
    struct error unused; // a shape that cannot be is not compared
    struct gpt whole;
    struct gpt_config c = run->gpt.config;
    size_t n = run->prepared.miniature;
    c.hidden *= n;
    c.vocab *= n;
    c.max_seq *= n;
    if (n > 1 && gpt_check(&c, &unused) == STATUS_OK) {
        gpt_open(&whole, &c);
        report_miniature(run->say, &run->prepared.problem, &whole.model, n);
    }
}

static int print_plan(struct run *run, struct error *err)
{
    const struct prepared *p = &run->prepared;
    if (!run->planned) {
        return STATUS_OK;
    }
    if (p->measured) {
        fprintf(run->say, "costs: this machine, measured%s%s\n",
                p->cached ? " earlier; to measure again, empty " : "", p->cached ? run->cache : "");
    } else {
        fprintf(run->say, "costs: %s, from its file%s\n", p->machine,
                run->o.emulate[0] ? "" : ": the times below are that machine's, not this one's");
    }
    if (run->o.emulate[0]) {
        fprintf(run->say, "slow motion: a second of %s takes %.4g s here\n", p->machine,
                p->slow_motion);
        print_miniature(run);
    }
    return report_plan(run->say, &p->plan, &p->problem, err);
}

static void print_model(const struct run *run)
{
    const struct gpt_config *c = &run->gpt.config;
    fprintf(run->say,
            "model: %zu layers, %zu channels, %zu heads, vocabulary %zu (padded %zu), "
            "%zu positions: %zu parameters\n",
            c->layers, c->hidden, c->heads, c->vocab, gpt_padded_vocab(c), c->max_seq,
            gpt_params(c));
}

// The part of a step's rows that each GPU of --plan-only has.
static int share_rows(const struct run *run, struct prepare_config *config, struct error *err)
{
    size_t gpus = config->gpus * config->nodes;
    if (config->rows % gpus || (config->B && config->rows / gpus % config->B)) {
        return error_set(err, STATUS_USAGE,
                         "--gpus %zu --nodes %zu: --total-batch %lld has %zu rows, which %zu GPUs "
                         "with micro-batches of %zu rows cannot share",
                         config->gpus, config->nodes, (long long)run->o.total_batch, config->rows,
                         gpus, config->B ? config->B : 1);
    }
    config->rows /= gpus;
    return STATUS_OK;
}

// How throughput per GPU changes with their number: with the micro-batch that auto has chosen.
static int plan_scaling(struct report_subject *subject, struct scale_point *points,
                        const struct prepare_config *config, const struct policy_result *automatic,
                        struct error *err)
{
    size_t B = config->B ? config->B : automatic->error[0] ? 1 : automatic->B;
    if (subject->gpus * subject->nodes == 1 || config->comm) {
        return STATUS_OK;
    }
    subject->scaling = points;
    return prepare_scaling(points, &subject->n_scaling, config, B, err);
}

static int report_all(const struct run *run, const struct report_subject *subject,
                      const struct policy_result *results, size_t n, struct error *err)
{
    bool any = false;
    for (size_t i = 0; i < n; i++) {
        any = any || !results[i].error[0];
    }
    if (run->o.format == FORMAT_TEXT) {
        report_policies(stdout, subject, results, n);
    } else if (report_policies_json(stdout, subject, results, n, err)) {
        return err->status;
    }
    return any ? STATUS_OK : error_set(err, STATUS_FAIL, "no policy's plan fits");
}

// Where ranks have measured: how many there are. Machines that have different numbers of them count
// as one.
static void count_machines(const struct run *run, struct report_subject *subject)
{
    if (run->ranks > 1) {
        size_t here = (size_t)comm_local_ranks(run->comm);
        subject->nodes = run->ranks % here ? 1 : run->ranks / here;
        subject->gpus = run->ranks / subject->nodes;
        subject->ranks = true;
    }
}

// Ranks measure this machine together; what is asked of a machine file the first one answers.
static int open_planning_ranks(struct run *run, struct error *err)
{
    if (run->o.machine[0]) {
        return STATUS_OK;
    }
    return open_ranks(run, err) || agree_to_start(run, err) || take_cores(run, err) ? err->status
                                                                                    : STATUS_OK;
}

static int run_plan_only(struct run *run, struct error *err)
{
    static struct comm_value values[AGREED_MAX];
    struct policy_result *results;
    struct scale_point points[SCALE_POINTS_MAX];
    char name[96];
    size_t n;
    if (open_planning_ranks(run, err)) {
        return err->status;
    }
    say_notes(run);
    choose_device(run);
    if (tokenizer_beside(&run->tokenizer, run->o.train, err) || choose_model(run, err) ||
        choose_batch(run, err) || (run->comm && agree_on_model(run, values, 0, err))) {
        return err->status;
    }
    struct prepare_config config = prepare_config(run);
    if (share_rows(run, &config, err) ||
        prepare_policies(&run->prepared, &results, &n, &config, err)) {
        return err->status;
    }
    print_model(run);
    const struct gpt_config *c = &run->gpt.config;
    snprintf(name, sizeof name, "%zu layers x %zu channels, %.3g parameters", c->layers, c->hidden,
             (double)gpt_params(c));
    struct report_subject subject = {
        .model = name,
        .machine = run->prepared.machine,
        .problem = &run->prepared.problem,
        .flops = gpt_flops_per_token(c, run->T) * (double)run->o.total_batch,
        .gpus = config.gpus,
        .nodes = config.nodes,
    };
    count_machines(run, &subject);
    int status = plan_scaling(&subject, points, &config, results, err);
    status = status ? status : report_all(run, &subject, results, n, err);
    free(results);
    return status;
}

static void print_run(const struct run *run)
{
    fprintf(run->say, "data: %llu rows of %zu tokens in %zu shards; validation: %llu rows\n",
            (unsigned long long)loader_rows(run->train), run->T, loader_shards(run->train),
            run->val ? (unsigned long long)loader_rows(run->val) : 0ull);
    fprintf(run->say, "step: %zu x %zu rows of %zu = %lld tokens; %llu steps\n", run->micro_batches,
            run->B, run->T, (long long)run->o.total_batch, (unsigned long long)run->steps);
    session_print_memory(run->session, run->say);
}

// Checkpoints of steps that this run has yet to make would be resumed later in place of its own; a
// new run does not write over the logs of an old one either.
static int set_aside_old(struct run *run, struct error *err)
{
    size_t count = 0;
    uint64_t first = run->step + (run->step > 0);
    if (run->rank > 0 || !run->o.out[0]) {
        return STATUS_OK;
    }
    if (checkpoint_set_aside(run->o.out, first, &count, err)) {
        return err->status;
    }
    const char *const logs[] = {"main.log", "metrics.jsonl", "loss.svg"};
    for (size_t i = 0; run->step == 0 && run->resumed.path[0] == 0 && i < 3; i++) {
        char path[PATH_MAX], old[PATH_MAX];
        int n = snprintf(path, sizeof path, "%s/%s", run->o.out, logs[i]);
        snprintf(old, sizeof old, "%.*s.old", n, path);
        rename(path, old); // fails where there is none
    }
    if (count) {
        fprintf(run->say,
                "%s: %zu checkpoint%s of step %llu and later, not of this run, renamed "
                "to *.old\n",
                run->o.out, count, count == 1 ? "" : "s", (unsigned long long)first);
    }
    return STATUS_OK;
}

// The loss that no model can beat is known for the default corpus: the picture shows it.
static int known_floor(const struct run *run, double *floor, struct error *err)
{
    const char *name = strrchr(run->o.train, '/');
    struct grammar *grammar;
    struct corpus_row_loss loss;
    *floor = 0;
    if (strncmp(name ? name + 1 : run->o.train, "stories_", 8) != 0) {
        return STATUS_OK;
    }
    if (grammar_open(&grammar, &corpus_source, err)) {
        return err->status;
    }
    if (corpus_row_loss(&loss, grammar, run->T, 1000, 1, err) == STATUS_OK) {
        *floor = loss.mean;
        fprintf(run->say, "stories: a perfect model would reach a loss of %.4f on rows of %zu\n",
                loss.mean, run->T);
    }
    grammar_close(grammar);
    return *floor > 0 ? STATUS_OK : err->status;
}

static int open_log(struct run *run, struct error *err)
{
    struct log_config config = {
        .dir = run->rank == 0 && run->o.out[0] ? run->o.out : NULL,
        .next = run->step,
        .steps = run->steps,
        .bar = isatty(fileno(run->say)),
        .json = run->o.log_json,
        .out = run->say,
        .dtype = run->o.dtype == CHOICE_BF16 ? "bf16" : "",
        .floor_label = "perfect model",
    };
    if (known_floor(run, &config.floor, err)) {
        return err->status;
    }
    return log_open(&run->log, &config, err);
}

// ---- generating text ----------------------------------------------------------------------------

// Validation and decoding run on the lanes too.
static int check_lanes(struct run *run, struct error *err)
{
    if (session_error(run->session)->status) {
        *err = *session_error(run->session);
        run->damaged = true; // something was cut off
    }
    return session_error(run->session)->status;
}

static bool print_token(void *ctx, int32_t token)
{
    const struct run *run = ctx;
    size_t len;
    const unsigned char *text =
        run->tokenizer ? tokenizer_decode(run->tokenizer, (uint32_t)token, &len) : NULL;
    if (run->tokenizer && (uint32_t)token == tokenizer_eot(run->tokenizer)) {
        return false;
    }
    if (text) {
        fwrite(text, 1, len, run->say);
    } else {
        fprintf(run->say, "%d ", token);
    }
    fflush(run->say);
    return run->ranks > 1 || !stop_signal; // others may not know of it, and decode along
}

// The prompt as tokens; end-of-text where there is none, or before one where nothing else is.
static int encode_prompt(struct run *run, struct tokens *out, struct error *err)
{
    uint32_t eot = run->tokenizer ? tokenizer_eot(run->tokenizer) : GPT2_EOT;
    struct encoder *encoder = NULL;
    const char *prompt = run->o.prompt;
    if (prompt[0] && !run->tokenizer) {
        return error_set(err, STATUS_USAGE,
                         "--prompt needs the tokenizer .bin beside the shards of --train %s, and "
                         "none is there",
                         run->o.train);
    }
    if (prompt[0]) {
        int status = encoder_open(&encoder, run->tokenizer, err);
        if (status == STATUS_OK) {
            status = encode(encoder, prompt, strlen(prompt), true, out, err);
            encoder_close(encoder);
        }
        if (status) {
            return status;
        }
    }
    if (out->n == 0) {
        out->ids = malloc(sizeof *out->ids);
        if (!out->ids) {
            return error_set(err, STATUS_FAIL, "no memory for the prompt");
        }
        out->ids[out->n++] = eot < run->gpt.config.vocab ? eot : 0;
    }
    for (size_t i = 0; i < out->n; i++) {
        if (out->ids[i] >= run->gpt.config.vocab) {
            return error_set(err, STATUS_FAIL,
                             "--prompt: token %u, but the model's vocabulary has %zu: this "
                             "tokenizer is not the model's",
                             out->ids[i], run->gpt.config.vocab);
        }
    }
    return STATUS_OK;
}

// Found at start, not at the first sample.
static int check_prompt(struct run *run, struct error *err)
{
    struct tokens prompt = {0};
    bool used = run->o.generate || (run->o.sample_every > 0 && run->o.sample_tokens > 0);
    int status = used ? encode_prompt(run, &prompt, err) : STATUS_OK;
    free(prompt.ids);
    return status;
}

static int sample(struct run *run, uint64_t seed, struct error *err)
{
    struct tokens prompt = {0};
    struct generate_config config = {
        .vocab = run->gpt.config.vocab,
        .max_seq = run->gpt.config.max_seq,
        .eot = run->tokenizer ? (int32_t)tokenizer_eot(run->tokenizer) : GPT2_EOT,
        .tokens = (size_t)run->o.sample_tokens,
        .temperature = run->o.temperature,
        .top_k = (size_t)run->o.top_k,
        .seed = seed,
        .comm = run->ranks > 1 ? run->comm : NULL,
    };
    int status = encode_prompt(run, &prompt, err);
    if (status == STATUS_OK) {
        fputs(run->o.prompt, run->say);
        status = generate(run->session, &config, (const int32_t *)prompt.ids, prompt.n, print_token,
                          run, err);
        fputc('\n', run->say);
        status = check_lanes(run, err) ? err->status : status;
    }
    free(prompt.ids);
    return status;
}

static int run_generate(struct run *run, struct error *err)
{
    struct options *o = &run->o;
    if (!is_file(o->model)) {
        return error_set(err, STATUS_USAGE,
                         "--generate needs a trained --model FILE (model_*.bin), not %s", o->model);
    }
    say_notes(run);
    choose_device(run);
    if (tokenizer_beside(&run->tokenizer, o->train, err) || choose_model(run, err) ||
        check_prompt(run, err)) {
        return err->status;
    }
    run->B = 1;
    run->T = run->gpt.config.max_seq;
    run->planned = o->device_memory != OPTION_AUTO || o->device == DEVICE_CUDA;
    struct prepare_config preparing = prepare_config(run);
    if (prepare_inference(&run->prepared, &preparing, err) ||
        open_device(run, &run->prepared.device, err)) {
        return err->status;
    }
    print_model(run);
    struct session_config config = {.B = run->B,
                                    .T = run->T,
                                    .micro_batches = 1,
                                    .plan = &run->prepared.plan,
                                    .host = run->host,
                                    .pinned = run->prepared.problem.budget.pinned};
    if (open_session(run, &config, err) || load_model_file(run, err)) {
        return err->status;
    }
    run->say = stdout;
    return sample(run, (uint64_t)o->seed, err);
}

// ---- validation ---------------------------------------------------------------------------------

// Sum of the losses of the `rows` rows that lie in tokens and targets; the rest of the micro-batch
// is filled up and ignored.
static double loss_of_rows(struct run *run, size_t rows)
{
    for (size_t i = rows * run->T; i < run->B * run->T; i++) {
        run->tokens[i] = 0;
        run->targets[i] = -1;
    }
    session_losses(run->session, run->tokens, run->targets, run->losses);
    double sum = 0;
    for (size_t i = 0; i < rows * run->T; i++) {
        sum += run->losses[i];
    }
    return sum;
}

// This rank's sum of the losses of rows [first, first + n) of the validation data; n may be 0.
static int loss_of_batch(struct run *run, uint64_t first, size_t n, double *sum, struct error *err)
{
    loader_rewind(run->val);
    loader_skip(run->val, first);
    for (size_t i = 0; i < n; i++) {
        if (loader_next(run->val, run->tokens + i * run->T, run->targets + i * run->T, err)) {
            return err->status;
        }
    }
    *sum = loss_of_rows(run, n);
    return check_lanes(run, err);
}

// In each round every rank takes a batch, and at the end some of them nothing, since all have to
// take part where units are sharded. The sum is over batches in their order.
static int validate(struct run *run, struct error *err)
{
    uint64_t rows = (uint64_t)run->o.val_batches * run->B;
    rows = rows < loader_rows(run->val) ? rows : loader_rows(run->val);
    double sum = 0, mine, all[run->ranks];
    for (uint64_t at = 0; at < rows; at += run->B * run->ranks) {
        uint64_t first = at + run->B * run->rank, left = first < rows ? rows - first : 0;
        size_t n = left < run->B ? (size_t)left : run->B;
        if (loss_of_batch(run, first, n, &mine, err) ||
            comm_all_gather(run->comm, &mine, all, sizeof mine, err)) {
            return err->status;
        }
        for (size_t r = 0; r < run->ranks; r++) {
            sum += all[r];
        }
    }
    return log_val(&run->log, run->step, run->step * (uint64_t)run->o.total_batch,
                   sum / (double)(rows * run->T), err);
}

// Room for the rows of one example.
struct example {
    int32_t *tokens, *targets;
    float *losses;
    unsigned char *mask;
};

static void free_example(struct example *x)
{
    free(x->tokens);
    free(x->targets);
    free(x->losses);
    free(x->mask);
}

static int take_example(struct example *x, size_t n, struct error *err)
{
    *x = (struct example){malloc(n * sizeof *x->tokens), malloc(n * sizeof *x->targets),
                          malloc(n * sizeof *x->losses), malloc(n)};
    return x->tokens && x->targets && x->losses && x->mask
               ? STATUS_OK
               : error_set(err, STATUS_FAIL, "no memory for an --eval example of %zu tokens", n);
}

static void losses_of_example(struct run *run, const struct example *x)
{
    size_t T = run->T, rows = EVAL_COMPLETIONS;
    for (size_t r = 0; r < rows; r += run->B) {
        size_t n = rows - r < run->B ? rows - r : run->B;
        memcpy(run->tokens, x->tokens + r * T, n * T * sizeof *x->tokens);
        memcpy(run->targets, x->targets + r * T, n * T * sizeof *x->targets);
        loss_of_rows(run, n);
        memcpy(x->losses + r * T, run->losses, n * T * sizeof *x->losses);
    }
}

// Multiple choice: the completion with the lowest mean loss over its own tokens. Every rank takes
// an example in turn; in the last round some take one again, which counts for nothing.
static int evaluate(struct run *run, struct error *err)
{
    size_t examples = evalset_count(run->evalset), right = 0, all[run->ranks];
    struct example x;
    int status = take_example(&x, EVAL_COMPLETIONS * run->T, err);
    for (size_t e = 0; status == STATUS_OK && e < examples && !run->stop; e += run->ranks) {
        bool counts = e + run->rank < examples;
        int label =
            evalset_rows(run->evalset, counts ? e + run->rank : 0, x.tokens, x.targets, x.mask);
        losses_of_example(run, &x);
        right += counts && evalset_choice(x.losses, x.mask, run->T) == label;
        status = check_lanes(run, err) || agree_to_stop(run, err) ? err->status : STATUS_OK;
    }
    free_example(&x);
    if (status || run->stop || comm_all_gather(run->comm, &right, all, sizeof right, err)) {
        return status ? status : run->stop ? STATUS_OK : err->status;
    }
    for (size_t r = 1; r < run->ranks; r++) {
        all[0] += all[r];
    }
    return log_eval(&run->log, run->step, run->step * (uint64_t)run->o.total_batch,
                    (double)all[0] / (double)examples, err);
}

// ---- training -----------------------------------------------------------------------------------

// Asked between backward and update, perhaps on another thread. The windows see every step, also
// those that are skipped.
static bool accept_update(void *ctx, double loss, double norm)
{
    struct asked *a = ctx;
    const struct options *o = &a->run->o;
    a->loss_z = outlier_add(&a->run->loss_window, loss);
    a->norm_z = outlier_add(&a->run->norm_window, norm);
    a->skip = (o->skip_loss_z > 0 && a->loss_z > o->skip_loss_z) ||
              (o->skip_norm_z > 0 && a->norm_z > o->skip_norm_z);
    return !a->skip;
}

static bool stop_asked(void *ctx)
{
    (void)ctx;
    return stop_signal != 0;
}

// On an error the data stays where it was, so that a checkpoint is still right.
static int next_batch(struct run *run, struct error *err)
{
    if (run->o.overfit_batch) {
        loader_rewind(run->train);
    }
    struct loader_state start = loader_tell(run->train);
    size_t rows = run->B * run->micro_batches;
    loader_skip(run->train, run->rank * rows);
    for (size_t i = 0; i < rows; i++) {
        if (loader_next(run->train, run->tokens + i * run->T, run->targets + i * run->T, err)) {
            struct error seeking;
            loader_seek(run->train, start, &seeking);
            return err->status;
        }
    }
    loader_skip(run->train, (run->ranks - 1 - run->rank) * rows);
    return STATUS_OK;
}

// On the first rank that holds such a value; all ranks look, and say the same.
static int find_nonfinite(struct run *run, char *where, size_t size, struct error *err)
{
    char mine[256] = "", all[run->ranks][sizeof mine];
    session_find_nonfinite(run->session, mine, sizeof mine);
    if (comm_all_gather(run->comm, mine, all, sizeof mine, err)) {
        return err->status;
    }
    for (size_t r = 0; r < run->ranks; r++) {
        if (all[r][0]) {
            snprintf(where, size, "%s", all[r]);
            return STATUS_OK;
        }
    }
    snprintf(where, size, "none (the sum overflows)");
    return STATUS_OK;
}

// A loss or norm that is not finite: which step, and the first tensor that holds such a value. The
// guard has kept the parameters as they were, so one bad step is survived; a run of them is not.
static int report_nonfinite(struct run *run, const struct session_result *r, struct error *err)
{
    char where[256];
    if (run->ranks > 1 && run->late.status) { // the others may be in that step: they cannot look
        *err = run->late;
        return err->status;
    }
    if (find_nonfinite(run, where, sizeof where, err)) {
        return err->status;
    }
    log_clear_bar(&run->log);
    if (run->rank == 0) {
        fprintf(stderr, "step %llu: loss %f, norm %f; first tensor that is not finite: %s%s\n",
                (unsigned long long)run->step, r->loss, r->norm, where,
                r->updated ? "" : "; no update was made");
    }
    run->damaged = r->updated || strncmp(where, "parameter", 9) == 0;
    if (run->damaged || ++run->bad_steps >= MAX_BAD_STEPS) {
        return error_set(err, STATUS_FAIL,
                         "step %llu: not finite: %s; go on from the last checkpoint with a lower "
                         "--lr or --clip",
                         (unsigned long long)run->step, where);
    }
    return STATUS_OK;
}

// The step has begun when this returns; it may still have to wait for the one before.
static int start_step(struct run *run, struct error *err)
{
    const struct options *o = &run->o;
    struct lr_schedule schedule = {.shape = (enum lr_shape)o->schedule,
                                   .lr = o->lr,
                                   .final = o->lr_final,
                                   .warmup = (uint64_t)o->warmup,
                                   .steps = run->steps};
    struct asked *asked = run->asked + run->started % 2;
    *asked = (struct asked){.run = run, .lr = lr_at(&schedule, run->started)};
    struct session_update update = {
        .lr = asked->lr,
        .beta1 = o->beta1,
        .beta2 = o->beta2,
        .eps = o->eps,
        .weight_decay = o->weight_decay,
        .clip = o->clip,
        .guard = !o->no_guard,
        .step = run->updates,
        .accept = accept_update,
        .stop = stop_asked,
        .ctx = asked,
    };
    if (session_in_flight(run->session) == 0) {
        run->finished_ms = 1e3 * clock_s();
    }
    if (next_batch(run, err)) {
        return err->status;
    }
    char doing[32];
    snprintf(doing, sizeof doing, "step %llu", (unsigned long long)run->started + 1);
    comm_doing(run->comm, COMM_MAIN, doing);
    session_start(run->session, run->tokens, run->targets, &update);
    run->started++;
    return STATUS_OK;
}

static int finish_step(struct run *run, struct error *err)
{
    const struct options *o = &run->o;
    const struct asked *asked = run->asked + run->step % 2;
    struct session_result r;
    session_finish(run->session, &r);
    if (check_lanes(run, err)) {
        return err->status;
    }
    double ms = 1e3 * clock_s() - run->finished_ms, tokens = (double)o->total_batch;
    run->finished_ms += ms;
    run->updates += r.updated;
    run->stop = run->stop || r.stop;
    if (asked->skip) {
        log_clear_bar(&run->log);
        fprintf(run->say, "step %llu skipped: z-score of loss %.2f, of norm %.2f\n",
                (unsigned long long)run->step + 1, asked->loss_z, asked->norm_z);
    }
    run->step++; // also if it changed nothing: its rows are used up
    if (isfinite(r.loss) && isfinite(r.norm)) {
        run->bad_steps = 0;
    } else if (report_nonfinite(run, &r, err)) {
        return err->status;
    }
    struct log_step line = {
        .step = run->step - 1,
        .tokens = run->step * (uint64_t)o->total_batch,
        .loss = r.loss,
        .norm = r.norm,
        .lr = asked->lr,
        .ms = ms,
        .mfu =
            gpt_flops_per_token(&run->gpt.config, run->T) * tokens / (ms * 1e-3) / run->peak_flops,
        .tokens_per_s = tokens / (ms * 1e-3),
        .skipped = !r.updated,
    };
    return log_train(&run->log, &line, err);
}

static bool due_at(const struct run *run, int64_t every, uint64_t step)
{
    return every > 0 && (step % (uint64_t)every == 0 || step == run->steps);
}

static bool due(const struct run *run, int64_t every)
{
    return due_at(run, every, run->step);
}

// After so many steps, is there anything to do but the next one?
static bool pauses(const struct run *run, uint64_t step)
{
    const struct options *o = &run->o;
    return step >= run->steps || (run->saves && due_at(run, o->checkpoint_every, step)) ||
           ((run->val || run->evalset) && due_at(run, o->val_every, step)) ||
           (o->sample_tokens > 0 && due_at(run, o->sample_every, step)) ||
           due_at(run, o->report, step);
}

// Finishes the oldest step. The next one is under way by then, unless something comes between or
// its data cannot be had: in that case the error shows when its turn has come.
static int train_step(struct run *run, struct error *err)
{
    if (session_in_flight(run->session) == 0 && start_step(run, err)) {
        return err->status;
    }
    run->late.status = STATUS_OK;
    if (session_in_flight(run->session) == 1 && !pauses(run, run->started) && !run->stop) {
        (void)start_step(run, &run->late);
    }
    return finish_step(run, err);
}

static int between_steps(struct run *run, struct error *err)
{
    const struct options *o = &run->o;
    if (run->planned) {
        watch_keep(&run->watch, run->session, run->step);
    }
    if (run->step > 0 && due(run, o->report) && run->step < run->steps) {
        log_clear_bar(&run->log);
        watch_report(&run->watch, run->say);
    }
    if (run->stop) {
        return STATUS_OK;
    }
    say_doing(run, "validation or sample after step");
    if (run->val && due(run, o->val_every) && validate(run, err)) {
        return err->status;
    }
    if (run->evalset && due(run, o->val_every) && evaluate(run, err)) {
        return err->status;
    }
    if (o->sample_tokens > 0 && run->step > 0 && due(run, o->sample_every)) {
        log_clear_bar(&run->log);
        fputs("generating:\n---\n", run->say);
        if (sample(run, (uint64_t)o->seed + run->step, err)) {
            return err->status;
        }
        fputs("---\n", run->say);
    }
    return STATUS_OK;
}

static void say_how_to_go_on(const struct run *run)
{
    fprintf(run->say, "stopped by a signal after step %llu; %s%s\n", (unsigned long long)run->step,
            run->o.out[0] ? "the same command with --resume goes on, --out "
                          : "nothing is saved without --out",
            run->o.out);
}

// What was trained is on the disk before anything else can go wrong: a due checkpoint comes before
// validation and samples, and an error in a later step saves the ones that were finished.
static int train(struct run *run, struct error *err)
{
    int status = STATUS_OK;
    run->started = run->step;
    run->saved = run->step;
    while (status == STATUS_OK) {
        // The others are in a step that this rank could not begin: they agree on nothing now.
        if (session_in_flight(run->session) > 0 || run->late.status) {
            status = train_step(run, err);
            continue;
        }
        if ((status = agree_to_stop(run, err))) {
            break;
        }
        bool stop = run->step >= run->steps || run->stop;
        if (run->saves && run->step > run->saved && (due(run, run->o.checkpoint_every) || stop)) {
            if (save_checkpoint(run, err)) {
                say_last_checkpoint(run);
                return err->status;
            }
        }
        status = between_steps(run, err);
        if (stop || run->stop) {
            break;
        }
        status = status ? status : train_step(run, err);
    }
    // After an error the next step may be under way: it ends as it would have.
    while (session_in_flight(run->session) > 0 && !run->damaged) {
        struct error later;
        (void)finish_step(run, &later);
    }
    // Of several ranks this one may be the only one that has failed: the others would not give
    // what they hold.
    bool alone = run->ranks == 1;
    bool save = status ? alone : run->stop;
    if (run->saves && run->step > run->saved && !run->damaged && save) {
        struct error saving;
        if (save_checkpoint(run, &saving)) {
            fprintf(stderr, "train_gpt: %s\n", saving.text);
        } else if (status) {
            fprintf(stderr, "train_gpt: step %llu is saved in %s\n", (unsigned long long)run->step,
                    run->o.out);
        }
    }
    if (status == STATUS_OK && run->stop) {
        log_clear_bar(&run->log);
        say_how_to_go_on(run);
    }
    if (status && (run->damaged || !alone)) {
        say_last_checkpoint(run);
    }
    return status;
}

// The other ranks have nothing to wait for once their times are with the first one.
static int draw(struct run *run, struct error *err)
{
    const struct options *o = &run->o;
    if (run->ranks > 1 && o->trace[0] && watch_gather(&run->watch, run->session, run->comm, err)) {
        return err->status;
    }
    return run->rank > 0 ? STATUS_OK
                         : watch_draw(&run->watch, run->session, o->trace, o->timeline, err);
}

static int run_training(struct run *run, struct error *err)
{
    struct options *o = &run->o;
    if (open_ranks(run, err)) {
        return err->status;
    }
    say_notes(run);
    if (agree_to_start(run, err) || take_cores(run, err) ||
        (run->rank == 0 && (lock_out(run, err) || check_outputs(run, err))) ||
        (o->resume && begin_resume(run, err))) {
        return err->status;
    }
    guess_val(run);
    choose_device(run);
    if (tokenizer_beside(&run->tokenizer, o->train, err) || choose_model(run, err) ||
        choose_batch(run, err) || check_prompt(run, err) || open_data(run, err) ||
        agree_on_files(run, err) || check_room(run, err) || make_plan(run, err) ||
        open_device(run, &run->prepared.device, err)) {
        return err->status;
    }
    print_model(run);
    struct session_config config = {
        .B = run->B,
        .T = run->T,
        .micro_batches = run->micro_batches,
        .train = true,
        .plan = &run->prepared.plan,
        .host = run->host,
        .pinned = run->prepared.problem.budget.pinned,
        .comm = run->ranks > 1 ? run->comm : NULL,
        .fast_reduce = o->fast_reduce,
        .chaos = (uint64_t)o->chaos,
        .pace = o->emulate[0] ? &run->prepared.costs : NULL,
        .lanes = run->planned,
    };
    if (open_session(run, &config, err) ||
        (run->planned && watch_open(&run->watch, &run->prepared, run->session, err))) {
        return err->status;
    }
    print_run(run);
    if (print_plan(run, err)) {
        return err->status;
    }
    if (run->resumed.fd >= 0 && run->resumed.step >= run->steps) {
        fprintf(run->say, "resume: step %llu of %llu is done already; --steps N goes on\n",
                (unsigned long long)run->resumed.step, (unsigned long long)run->steps);
    }
    int status = run->resumed.fd >= 0 ? load_state(run, err)
                 : is_file(o->model)  ? load_model_file(run, err)
                                      : init_parameters(run, err);
    if (status || set_aside_old(run, err) || open_log(run, err)) {
        return err->status;
    }
    run->peak_flops = device_matmul_rate(run->dev, 1024) * (double)run->ranks;
    fprintf(run->say, "matrix products: %.1f GFLOP/s (MFU is held against this)\n",
            run->peak_flops / 1e9);
    status = agree_to_train(run, err) ? err->status : train(run, err);
    if (status == STATUS_OK && run->planned) {
        log_clear_bar(&run->log);
        watch_report(&run->watch, run->say);
        status = draw(run, err);
    }
    struct error closing;
    int closed = log_close(&run->log, &closing);
    if (status == STATUS_OK && closed) {
        *err = closing;
        status = closed;
    }
    return status;
}

static void close_run(struct run *run)
{
    session_close(run->session);
    if (run->comm) {
        comm_use_device(run->comm, NULL);
    }
    if (run->dev) {
        device_close(run->dev);
    }
    if (run->host) {
        device_close(run->host);
    }
    watch_close(&run->watch);
    if (run->train) {
        loader_close(run->train);
    }
    if (run->val) {
        loader_close(run->val);
    }
    if (run->evalset) {
        evalset_close(run->evalset);
    }
    if (run->tokenizer) {
        tokenizer_free(run->tokenizer);
    }
    if (run->resumed.fd >= 0) {
        state_close(&run->resumed);
    }
    struct error closing;
    if (run->comm) {
        (void)comm_close(run->comm, &closing); // what it says was said when it happened
    }
    dir_unlock(&run->lock);
    free(run->tokens);
    free(run->targets);
    free(run->losses);
}

// OpenMP's threads wait for each other by spinning for milliseconds. On a machine that others use
// too the one waited for may not be running: a spinning thread then takes the core that it waits
// for, and training is several times slower. A short spin, then sleep, costs nothing when alone.
// GNU's OpenMP reads this while it is loaded, so the program starts itself once more.
static void wait_politely(char **argv)
{
    if (!getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT")) {
        setenv("GOMP_SPINCOUNT", "10000", 1);
#ifndef __clang__
        setenv("OMP_WAIT_POLICY", "active", 1); // or it would hardly spin where teams share cores
#endif
        setenv("KMP_BLOCKTIME", "0", 0); // the same for LLVM's
        execv("/proc/self/exe", argv);   // if it fails, only speed is lost
    }
}

int main(int argc, char **argv)
{
    wait_politely(argv);
    static struct run run = {.lock.fd = -1, .resumed.fd = -1, .ranks = 1};
    struct error err = {0};
    if (options_parse(&run.o, argc, argv, &err)) {
        fprintf(stderr, "train_gpt: %s\n", err.text);
        return err.status;
    }
    if (run.o.help) {
        options_help(stdout);
        return STATUS_OK;
    }
    if (run.o.version) {
        puts("train_gpt " VERSION);
        return STATUS_OK;
    }
    run.say = run.o.log_json || run.o.generate || run.o.plan_only ? stderr : stdout;
    setvbuf(stdout, NULL, _IOLBF, 0);
    catch_signals();
    bool alone = run.o.generate || (run.o.plan_only && run.o.machine[0]);
    if (alone && comm_launched_rank() > 0) {
        fprintf(stderr, "train_gpt: rank %d has nothing to do: --%s is done by rank 0\n",
                comm_launched_rank(), run.o.generate ? "generate" : "plan-only");
        return STATUS_OK;
    }
    int status = run.o.plan_only  ? run_plan_only(&run, &err)
                 : run.o.generate ? run_generate(&run, &err)
                                  : run_training(&run, &err);
    if (status) {
        fprintf(stderr, "train_gpt: %s\n", err.text);
    }
    if (run.comm && status) {
        comm_abort(run.comm, err.text);
    }
    if (run.session && session_error(run.session)->status) {
        _exit(status); // a lane may still be at work, on memory that must not go before it
    }
    close_run(&run);
    if (fflush(stdout) || ferror(stdout)) {
        fprintf(stderr, "train_gpt: stdout cannot be written: not all that was printed is there\n");
        status = status ? status : STATUS_FAIL;
    }
    return status ? status : stop_signal ? 128 + stop_signal : STATUS_OK;
}
