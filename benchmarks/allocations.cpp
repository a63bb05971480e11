// Counts the live bytes of a process at its allocators, for benchmarks/allocations.py. Loaded with LD_PRELOAD.
//
// A tensor's memory is what libc10 takes from posix_memalign on the main thread, which runs the backward pass too. Other
// aligned blocks of that thread belong to kernels (oneDNN, MKL); blocks of other threads to communication (gloo).
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

extern "C" {
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);
}

namespace {

enum Kind { TENSORS, COMMUNICATION, KERNELS, KINDS };

constexpr size_t SMALLEST = 4096;  // of a block of communication; smaller ones are bookkeeping
constexpr size_t SLOTS = 1 << 20;  // of the table of live blocks, by address; a power of two
constexpr size_t MOST_BLOCKS = SLOTS / 2;

struct Block {
    uintptr_t address;
    size_t size;
    Kind kind;
};

Block blocks[SLOTS];
size_t num_blocks;
int64_t live[KINDS];
int64_t peak;                    // of tensors and communication together
int64_t at_peak[KINDS];
int64_t most_of_kernels;
bool is_full;
volatile bool is_counting = false;
uintptr_t c10_begin, c10_end;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

size_t first_slot(uintptr_t address) { return (address >> 4) * 0x9E3779B97F4A7C15ull >> 44; }

bool is_main_thread() { return syscall(SYS_gettid) == getpid(); }

void note_peak() {
    if (live[KERNELS] > most_of_kernels) most_of_kernels = live[KERNELS];
    int64_t total = live[TENSORS] + live[COMMUNICATION];
    if (total <= peak) return;
    peak = total;
    memcpy(at_peak, live, sizeof live);
}

void add(void *address, size_t size, Kind kind) {
    if (address == nullptr) return;
    pthread_mutex_lock(&lock);
    if (num_blocks < MOST_BLOCKS) {
        size_t index = first_slot((uintptr_t)address);
        while (blocks[index].address != 0) index = (index + 1) % SLOTS;
        blocks[index] = {(uintptr_t)address, size, kind};
        num_blocks++;
        live[kind] += size;
        note_peak();
    } else {
        is_full = true;
    }
    pthread_mutex_unlock(&lock);
}

// Empties a slot, and moves into it what a search would no longer reach behind it.
void empty(size_t hole) {
    for (size_t next = (hole + 1) % SLOTS; blocks[next].address != 0; next = (next + 1) % SLOTS) {
        size_t wanted = first_slot(blocks[next].address);
        if ((next - wanted) % SLOTS < (next - hole) % SLOTS) continue;
        blocks[hole] = blocks[next];
        hole = next;
    }
    blocks[hole].address = 0;
    num_blocks--;
}

void remove(void *address) {
    pthread_mutex_lock(&lock);
    size_t index = first_slot((uintptr_t)address);
    while (blocks[index].address != 0 && blocks[index].address != (uintptr_t)address) index = (index + 1) % SLOTS;
    if (blocks[index].address != 0) {
        live[blocks[index].kind] -= blocks[index].size;
        empty(index);
    }
    pthread_mutex_unlock(&lock);
}

int find_c10(struct dl_phdr_info *library, size_t, void *) {
    if (strstr(library->dlpi_name, "libc10.so") == nullptr) return 0;
    for (int i = 0; i < library->dlpi_phnum; i++) {
        const auto &part = library->dlpi_phdr[i];
        if (part.p_type != PT_LOAD || !(part.p_flags & PF_X)) continue;
        c10_begin = library->dlpi_addr + part.p_vaddr;
        c10_end = c10_begin + part.p_memsz;
    }
    return 1;
}

// What an allocation function made.
void *counted(void *made, size_t size, bool is_aligned, void *caller) {
    if (!is_counting) return made;
    if (!is_main_thread()) {
        if (size >= SMALLEST) add(made, size, COMMUNICATION);
    } else if (is_aligned) {
        bool is_of_c10 = (uintptr_t)caller >= c10_begin && (uintptr_t)caller < c10_end;
        add(made, size, is_of_c10 ? TENSORS : KERNELS);
    }
    return made;
}

}  // namespace

extern "C" {

// Starts counting, from nothing. Returns 0, or 1 if torch is not loaded.
int allocations_start() {
    dl_iterate_phdr(find_c10, nullptr);
    if (c10_begin == 0) return 1;
    pthread_mutex_lock(&lock);
    for (Block &block : blocks)
        if (block.address != 0) block.address = 0;  // writing to all of them would make the process larger
    num_blocks = 0;
    is_full = false;
    memset(live, 0, sizeof live);
    is_counting = true;
    pthread_mutex_unlock(&lock);
    return 0;
}

void allocations_stop() { is_counting = false; }

// Forgets the peaks so far.
void allocations_reset_peak() {
    pthread_mutex_lock(&lock);
    peak = most_of_kernels = 0;
    note_peak();
    pthread_mutex_unlock(&lock);
}

// Bytes of tensors and of communication at the peak of their sum, and the most of kernels. Returns 1 if blocks were
// left out.
int allocations_read(int64_t *values) {
    pthread_mutex_lock(&lock);
    memcpy(values, at_peak, sizeof at_peak);
    values[KERNELS] = most_of_kernels;
    pthread_mutex_unlock(&lock);
    return is_full;
}

void *malloc(size_t size) { return counted(__libc_malloc(size), size, false, __builtin_return_address(0)); }

void *calloc(size_t number, size_t size) {
    return counted(__libc_calloc(number, size), number * size, false, __builtin_return_address(0));
}

void *realloc(void *block, size_t size) {
    if (is_counting && block != nullptr) remove(block);
    return counted(__libc_realloc(block, size), size, false, __builtin_return_address(0));
}

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *made = __libc_memalign(alignment, size);
    if (made == nullptr) return 12;  // ENOMEM
    *block = counted(made, size, true, __builtin_return_address(0));
    return 0;
}

void *aligned_alloc(size_t alignment, size_t size) {
    return counted(__libc_memalign(alignment, size), size, true, __builtin_return_address(0));
}

void *memalign(size_t alignment, size_t size) {
    return counted(__libc_memalign(alignment, size), size, true, __builtin_return_address(0));
}

void free(void *block) {
    if (is_counting && block != nullptr) remove(block);
    __libc_free(block);
}
}
