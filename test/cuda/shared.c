// Shared memory of a block: dynamic and static, poisoned for each block.
//
// Static: shim.h makes __shared__ variables thread-local, each in a slot of SIM_SHARED_ALIGN bytes.
// The program's symbol table tells which slots and how large; a launch has those that it touches.
#include "test/cuda/kernel.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SLOT          ((uintptr_t)SIM_SHARED_ALIGN)
#define DYNAMIC_ALIGN 128 // what DYN_SMEM promises, and not better

uintptr_t sim_dynamic, sim_tls;
size_t sim_tls_bytes;

static struct sim_variable *variables, **in_slot;
static size_t n_variables;

static void *map(size_t bytes, int protection)
{
    void *p = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("shared memory of CUDA blocks");
        abort();
    }
    return p;
}

static void open_dynamic(void)
{
    char *window = map(SIM_DYNAMIC_BYTES + 2 * SIM_WINDOW, PROT_NONE);
    if (mprotect(window + SIM_WINDOW, SIM_DYNAMIC_BYTES, PROT_READ | PROT_WRITE)) {
        perror("shared memory of CUDA blocks");
        abort();
    }
    sim_dynamic = (uintptr_t)window + SIM_WINDOW + DYNAMIC_ALIGN;
}

// The program itself comes first, and is the only one that is looked at.
static int find_tls(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size, (void)data;
    sim_tls_bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type == PT_TLS && info->dlpi_tls_data) {
            sim_tls = (uintptr_t)info->dlpi_tls_data;
            sim_tls_bytes = info->dlpi_phdr[i].p_memsz;
        }
    }
    return 1;
}

static void add_symbol(const Elf64_Sym *symbol, const char *name)
{
    bool guard = strncmp(name, "_ZGV", 4) == 0;
    uintptr_t at = symbol->st_value; // from the block's beginning
    if (ELF64_ST_TYPE(symbol->st_info) == STT_TLS && symbol->st_shndx != SHN_UNDEF &&
        symbol->st_size && (guard || (sim_tls + at) % SLOT == 0)) {
        variables = realloc(variables, (n_variables + 1) * sizeof *variables);
        if (!variables) {
            abort();
        }
        variables[n_variables++] = (struct sim_variable){
            .symbol = name, .at = sim_tls + at, .bytes = symbol->st_size, .guard = guard};
    }
}

// The file stays mapped: names lie in it.
static void read_symbols(void)
{
    int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (fd < 0 || fstat(fd, &st)) {
        perror("/proc/self/exe");
        abort();
    }
    const char *file = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (file == MAP_FAILED) {
        perror("/proc/self/exe");
        abort();
    }
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)file;
    const Elf64_Shdr *section = (const Elf64_Shdr *)(file + header->e_shoff);
    for (int s = 0; s < header->e_shnum; s++) {
        if (section[s].sh_type == SHT_SYMTAB) {
            const Elf64_Sym *symbol = (const Elf64_Sym *)(file + section[s].sh_offset);
            const char *names = file + section[section[s].sh_link].sh_offset;
            for (size_t i = 0; i < section[s].sh_size / sizeof *symbol; i++) {
                add_symbol(&symbol[i], names + symbol[i].st_name);
            }
        }
    }
}

static void find_variables(void)
{
    read_symbols();
    in_slot = calloc(sim_tls_bytes / SLOT + 2, sizeof(struct sim_variable *));
    if (!in_slot) {
        abort();
    }
    for (size_t i = 0; i < n_variables; i++) {
        if (!variables[i].guard) {
            in_slot[variables[i].at / SLOT - sim_tls / SLOT] = &variables[i];
        }
    }
}

struct sim_variable *sim_variable_at(uintptr_t a)
{
    struct sim_variable *v = in_slot[a / SLOT - sim_tls / SLOT];
    if (v && !v->used) {
        v->used = true;
        memset((void *)v->at, 0xff, v->bytes);
    }
    return v;
}

bool sim_is_guard(uintptr_t a)
{
    for (size_t i = 0; i < n_variables; i++) {
        if (variables[i].guard && a - variables[i].at < variables[i].bytes) {
            return true;
        }
    }
    return false;
}

char *__cxa_demangle(const char *symbol, char *buffer, size_t *bytes, int *status);

const char *sim_variable_name(const struct sim_variable *v)
{
    static char name[128];
    char *full = __cxa_demangle(v->symbol, NULL, NULL, NULL);
    const char *last = full ? strrchr(full, ':') : NULL;
    snprintf(name, sizeof name, "%s", last ? last + 1 : full ? full : v->symbol);
    free(full);
    return name;
}

void *sim_dynamic_shared(void)
{
    return (void *)sim_dynamic;
}

void sim_shared_launch(void)
{
    if (!sim_dynamic) {
        open_dynamic();
    }
    uintptr_t before = sim_tls;
    dl_iterate_phdr(find_tls, NULL);
    if (!in_slot) {
        find_variables();
    } else if (sim_tls != before) { // another thread calls now
        for (size_t i = 0; i < n_variables; i++) {
            variables[i].at += sim_tls - before;
        }
    }
    for (size_t i = 0; i < n_variables; i++) {
        variables[i].used = false;
    }
}

void sim_shared_block(void)
{
    memset((void *)sim_dynamic, 0xff, sim_kernel_now->smem);
    for (size_t i = 0; i < n_variables; i++) {
        if (variables[i].used) {
            memset((void *)variables[i].at, 0xff, variables[i].bytes);
        }
    }
}
