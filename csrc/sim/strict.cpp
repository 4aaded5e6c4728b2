// The strict card's detectors: every load and store of a kernel is looked at before it happens.
//
// The kernels' files are compiled with -fsanitize=thread,alignment and linked with the functions at the end of this
// file in place of the sanitizers' runtimes. They are hidden symbols, since a program that is itself run under a
// sanitizer must not meet them.
//
// Order. `now.clock` counts fences, barriers and atomic operations; an access carries the count at its time. An access
// of another thread came before one of this thread where
//   - both are in one block, and a barrier of it completed in between (for global memory one that orders it), or both
//     are in one wave and a wave barrier did; or
//   - they are in different blocks, and the first was released and this one acquired: after the first access its thread
//     passed a fence, and itself or, after a barrier of their block, another thread did an atomic operation, after
//     which a thread of this block did one on the same word; then this thread, or after a barrier another one, passed a
//     fence. (On either side the thread of the atomic operation may be the one that passes the fence.)
// Two accesses of which one is a write, neither before the other, are an error. Since what counts is the order that the
// kernel asks for and not the one that happened, most of them are seen under any seed.
//
// A barrier of the cluster orders no accesses: after it each block has begun and expects its arrivals. What is sent may
// only go to words that nobody there has touched. Bytes on their way, by a bulk copy or from another block, may be
// touched by a thread that has waited for their arrivals, or behind a barrier that follows such a wait.
//
// Launches run one after the other, but of those that on a card may overlap the launch ahead of them it is known what a
// thread touches before it has waited: check_unwaited().
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "sim/traffic.hpp"
#include "sim/watch.hpp"

#if !defined(STRATA_SIM_STRICT)
#error "for the strict library only"
#endif

namespace strata::sim::watch {
namespace {

constexpr int kIllegalAddress = 700;
constexpr int kLaunchFailure = 719;

struct Fence {
    unsigned thread;  // in the block
    std::uint64_t time;
};

struct BlockHistory {
    std::vector<std::uint64_t> barriers;  // those that order global memory
    std::vector<Fence> fences;
};

struct Atomic {
    const void* address;
    std::uint32_t thread;  // in the launch
    std::uint64_t time;
};

struct LaunchHistory {
    std::uint64_t began = 0;
    bool early = false;  // a thread let the next launch begin before it had itself waited for the one ahead
    std::uint64_t accesses = 0;
    std::vector<BlockHistory> blocks;
    std::vector<Atomic> atomics;
};

LaunchHistory history;

// When an overlapping launch begins, launches ahead of it in its stream that began at this time or later may still run:
// the one ahead, and where that let this one begin before it had waited itself, whatever might still run when that one
// began. Behind a launch that does not overlap, or none, anything may: it stands for somebody else's.
constexpr std::uint64_t kAnything = 0;
std::map<const void*, std::uint64_t> running_since_of;
std::uint64_t running_since = kAnything;

std::uint64_t tick() { return ++now.clock; }

// The running thread's number in the launch.
std::uint32_t me() { return current->block->number * now.launch->block + current->index; }
unsigned block_of(std::uint32_t thread) { return thread / now.launch->block; }
unsigned index_of(std::uint32_t thread) { return thread % now.launch->block; }

std::string name_of(std::uint32_t thread) {
    const std::string text = "thread " + std::to_string(index_of(thread));
    if (block_of(thread) == current->block->number) return text;
    return text + " of block " + block_name(block_at(block_of(thread)));
}

bool fenced_between(unsigned block, unsigned thread, std::uint64_t after, std::uint64_t before) {
    const auto& fences = history.blocks[block].fences;
    return std::any_of(fences.begin(), fences.end(),
                       [&](const Fence& f) { return f.thread == thread && f.time > after && f.time < before; });
}

// A write or read of `thread` at `time` is seen by whoever sees the atomic operation that `by` did at `done`.
bool released(std::uint32_t thread, std::uint64_t time, std::uint32_t by, std::uint64_t done) {
    const unsigned block = block_of(thread);
    if (block != block_of(by)) return false;
    if (thread == by) return fenced_between(block, index_of(thread), time, done);
    const auto& barriers = history.blocks[block].barriers;
    return std::any_of(barriers.begin(), barriers.end(), [&](std::uint64_t barrier) {
        return barrier > time && barrier < done &&
               (fenced_between(block, index_of(thread), time, barrier + 1) ||
                fenced_between(block, index_of(by), barrier - 1, done));
    });
}

// What the atomic operation that `by` did at `done` saw, the running thread sees.
bool acquired(std::uint32_t by, std::uint64_t done) {
    const unsigned block = current->block->number;
    constexpr std::uint64_t kNow = ~std::uint64_t{0};
    if (block != block_of(by)) return false;
    if (me() == by) return fenced_between(block, current->index, done, kNow);
    const auto& barriers = history.blocks[block].barriers;
    return std::any_of(barriers.begin(), barriers.end(), [&](std::uint64_t barrier) {
        return barrier > done && (fenced_between(block, current->index, barrier, kNow) ||
                                  fenced_between(block, index_of(by), done, barrier));
    });
}

// Whether the running thread's next access to global memory comes after the one of `thread` at `time`.
bool ordered(std::uint32_t thread, std::uint64_t time) {
    if (time < history.began || thread == me()) return true;
    const Block& block = *current->block;
    if (block_of(thread) == block.number) {
        const unsigned wave = wave_number(index_of(thread));
        return time < block.global_ordered || (wave == wave_number(current->index) && time < block.waves[wave].ordered);
    }
    for (const Atomic& first : history.atomics) {
        if (!released(thread, time, first.thread, first.time)) continue;
        for (const Atomic& second : history.atomics) {
            if (second.address == first.address && second.time > first.time && acquired(second.thread, second.time)) {
                return true;
            }
        }
    }
    return false;
}

[[noreturn]] void report_global(const void* caller, const Buffer& buffer, const void* address, const char* did,
                                std::uint32_t other, const char* other_did) {
    const auto offset = static_cast<const char*>(address) - buffer.begin;
    stop_here(kLaunchFailure, caller,
              std::string(did) + " byte " + std::to_string(offset) + " of " + buffer.name + ", which " +
                  name_of(other) + " " + other_did + " with no order between them" +
                  (block_of(other) == current->block->number ? " (no barrier)" : " (fence, atomic operation, fence)"));
}

enum class Kind { Read, Write, Atomic };

// What a thread of an overlapping launch may touch before it has waited: it may read what no launch writes that can
// still run.
void check_unwaited(const Buffer& buffer, std::uint64_t written, Kind kind, const char* did, const void* caller) {
    if (!now.launch->overlapping || current->waited) return;
    const auto stop = [&](const char* why) {
        const std::string what = std::string(did) + " " + buffer.name + " before it has waited for the launch ahead";
        stop_here(kLaunchFailure, caller, what + why);
    };
    if (kind != Kind::Read) stop("");
    if (running_since == kAnything) stop(", beside which anything may run");
    if (written >= running_since) stop(", and one that may still run writes it");
}

void global_access(const char* address, std::size_t bytes, Kind kind, const void* caller) {
    Buffer* buffer = now.memory->find(address);
    const char* did = kind == Kind::Read ? "reads" : "writes";
    if (buffer == nullptr) {
        stop_here(kIllegalAddress, caller,
                  std::string(did) + " outside of the buffers of the launch, " + now.memory->describe(address));
    }
    if (!buffer->holds(address + bytes - 1)) {
        stop_here(kIllegalAddress, caller, std::string(did) + " past the end of " + buffer->name);
    }
    if (!buffer->writable) {
        if (kind != Kind::Read)
            stop_here(kIllegalAddress, caller, "writes to " + buffer->name + ", which is read-only");
        check_unwaited(*buffer, 0, kind, did, caller);
        return;
    }
    const auto offset = static_cast<std::size_t>(address - buffer->begin);
    for (std::size_t i = offset / 4; i <= (offset + bytes - 1) / 4; ++i) {
        GlobalWord& word = buffer->words[i];
        check_unwaited(*buffer, word.written, kind, did, caller);
        const bool atomics = kind == Kind::Atomic && word.atomic;
        if (kind != Kind::Write && !buffer->defined && !word.defined) {
            stop_here(kLaunchFailure, caller,
                      "reads byte " + std::to_string(i * 4) + " of " + buffer->name + ", which nobody has written");
        }
        // A word of bytes that different threads write is no race.
        const bool partly = bytes < 4;
        if (word.written != 0 && !atomics && !(partly && kind == Kind::Write) && !ordered(word.writer, word.written)) {
            report_global(caller, *buffer, address, did, word.writer, "wrote");
        }
        if (kind != Kind::Read && word.read != 0 && !ordered(word.reader, word.read)) {
            report_global(caller, *buffer, address, did, word.reader, "read");
        }
        if (kind == Kind::Read) {
            word.read = now.clock;
            word.reader = me();
        } else {
            word.written = now.clock;
            word.writer = me();
            word.defined = true;
            word.atomic = kind == Kind::Atomic;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Shared memory

// "byte 12 of its dynamic shared memory"
std::string shared_place(std::size_t offset) {
    const std::size_t statics = kSharedArena - kArenaGuard - now.static_bytes;
    if (offset < std::max(statics / 2, now.launch->shared_bytes)) {
        return "byte " + std::to_string(offset) + " of its dynamic shared memory (" +
               std::to_string(now.launch->shared_bytes) + " bytes)";
    }
    // Where no piece is, the nearest before it.
    std::size_t first = statics;
    for (const StaticPiece& piece : now.pieces) {
        if (piece.offset <= offset) first = std::max(first, piece.offset);
    }
    for (const StaticPiece& piece : now.pieces) {
        if (piece.offset != first) continue;
        return "byte " + std::to_string(offset - first) + " of a static piece of shared memory (" +
               std::to_string(piece.bytes) + " bytes)";
    }
    return "shared memory";
}

// The bytes must lie in one piece of the block's shared memory.
void check_shared_bounds(std::size_t offset, std::size_t bytes, const char* did, const void* caller) {
    if (in_shared_piece(offset, bytes)) return;
    stop_here(kIllegalAddress, caller, std::string(did) + " past the end: " + shared_place(offset));
}

// Whether what threads of wave `wave` of the block did at `time` came before the running thread's last barrier. Of
// threads of several waves `wave` is kMany. (A cluster's barrier orders nothing.)
inline bool shared_ordered_wave(std::uint64_t time, unsigned wave) {
    const Block& block = *current->block;
    return time < block.shared_ordered || (wave == wave_number(current->index) && time < block.waves[wave].ordered);
}
inline bool shared_ordered(std::uint64_t time, unsigned thread) {
    return shared_ordered_wave(time, wave_number(thread));
}

// Whether the running thread may know that these are here: it has waited for them, or another thread of its block and a
// barrier followed.
bool knows_arrived(const Expected& expected) {
    if (!expected.awaited) return false;
    const auto& waited = expected.waited;
    if (waited[current->index] != 0 || shared_ordered(waited[expected.first], expected.first)) return true;
    for (unsigned i = 0; i < waited.size(); ++i) {
        if (waited[i] != 0 && shared_ordered(waited[i], i)) return true;
    }
    return false;
}

// Of a word that something is on its way to, whether the running thread may touch it all the same.
[[gnu::noinline]] void check_landing(const SharedWord& word, std::size_t offset, const char* did, const void* caller) {
    std::string why;
    if (word.landing == kHoldsArrivals) {
        why = "holds arrivals";
    } else if (word.landing == kCopyLands) {
        why = "a copy in the background of thread " + std::to_string(word.writer) + " may still write";
    } else if (!knows_arrived(current->block->expected[word.landing - 1u])) {
        why =
            "may be on its way: it has not waited for the arrivals, nor has another thread and then a barrier followed";
    } else {
        return;
    }
    stop_here(kLaunchFailure, caller, std::string(did) + " " + shared_place(offset) + ", which " + why);
}

void shared_access(std::size_t offset, std::size_t bytes, bool write, const void* caller) {
    Block& block = *current->block;
    const char* did = write ? "writes" : "reads";
    check_shared_bounds(offset, bytes, did, caller);
    const auto self = static_cast<std::uint16_t>(current->index);
    const auto wave = static_cast<std::uint16_t>(wave_number(current->index));
    for (std::size_t i = offset / 4; i <= (offset + bytes - 1) / 4; ++i) {
        SharedWord& word = block.words[i];
        const auto race = [&](const char* other_did, unsigned other) {
            stop_here(kLaunchFailure, caller,
                      std::string(did) + " " + shared_place(i * 4) + ", which " +
                          (other == kMany ? std::string("other threads") : "thread " + std::to_string(other)) + " " +
                          other_did + ", with no barrier between");
        };
        if (word.written < block.began) {
            word.bytes = 0;
            word.landing = kNothingLands;
        }
        const bool lands = word.landing != kNothingLands;
        if (lands) check_landing(word, i * 4, did, caller);
        const std::size_t from = std::max(offset, i * 4) - i * 4;
        const std::size_t to = std::min(offset + bytes, i * 4 + 4) - i * 4;
        const auto touched = static_cast<std::uint8_t>((0xfu >> (4 - (to - from))) << from);
        if (!write && (word.bytes & touched) != touched) {
            stop_here(kLaunchFailure, caller, "reads " + shared_place(i * 4) + ", which nobody has written");
        }
        if (word.written >= block.began && !lands && word.writer != self &&
            !shared_ordered(word.written, word.writer)) {
            race("wrote", word.writer);
        }
        if (write) {
            if (word.read >= block.began && word.reader != self && !shared_ordered_wave(word.read, word.reader_wave)) {
                race("read", word.reader);
            }
            word.landing = kNothingLands;
            word.written = now.clock;
            word.writer = self;
            word.bytes = static_cast<std::uint8_t>(word.bytes | touched);
        } else {
            const bool fresh = word.read < block.began || word.read < block.shared_ordered;
            word.reader = fresh || word.reader == self ? self : kMany;
            word.reader_wave = fresh || word.reader_wave == wave ? wave : kMany;
            word.read = now.clock;
        }
    }
}

// A copy in the background: from its beginning until it lands nobody may touch the words that it writes.
void mark_landing(const Copy& copy, bool landing) {
    const auto offset = static_cast<std::size_t>(reinterpret_cast<const char*>(copy.to) - current->block->arena.get());
    for (std::size_t i = offset / 4; i < (offset + sizeof *copy.to) / 4; ++i) {
        current->block->words[i].landing = landing ? kCopyLands : kNothingLands;
        current->block->words[i].written = now.clock;
    }
}

// Bytes that are expected: from when they are on their way nobody may touch them who does not know that they are here.
void mark_delivery(Block& to, const Delivery& delivery) {
    for (std::size_t i = delivery.offset / 4; i < (delivery.offset + delivery.bytes) / 4; ++i) {
        SharedWord& word = to.words[i];
        word.landing = static_cast<std::uint8_t>(delivery.expected + 1);
        word.written = now.clock;
        word.bytes = 0xf;
    }
}

// What is sent to another block goes to words that nothing there has touched: no barrier orders the two blocks.
void check_send(Block& to, const Delivery& delivery, const void* caller) {
    for (std::size_t i = delivery.offset / 4; i < (delivery.offset + delivery.bytes) / 4; ++i) {
        SharedWord& word = to.words[i];
        if (word.written < to.began) word.landing = kNothingLands;
        const auto race = [&](const std::string& why) {
            stop_here(kLaunchFailure, caller,
                      "sends to block " + block_name(to.index) + ", " + shared_place(i * 4) + ", which " + why);
        };
        const auto others = [&](unsigned thread, const char* did) {
            race((thread == kMany ? std::string("other threads") : "thread " + std::to_string(thread)) + " " + did +
                 ", and no barrier orders the blocks of a cluster");
        };
        if (word.landing == kCopyLands) race("a copy in the background may still write");
        if (word.landing != kNothingLands) race("may be on its way already");
        if (word.read >= to.began) others(word.reader, "read");
        if (word.written >= to.began) others(word.writer, "wrote");
    }
}

// ---------------------------------------------------------------------------------------------------------------------

void access(const void* address, std::size_t bytes, Kind kind, const void* caller) {
    if (current == nullptr || bytes == 0) return;  // host code of the same file
    const auto* place = static_cast<const char*>(address);
    const auto within = [&](const char* begin, std::size_t size) {
        return reinterpret_cast<std::uintptr_t>(place) - reinterpret_cast<std::uintptr_t>(begin) < size;
    };
    if (within(current->stack, kStackBytes)) return;
    ++history.accesses;
    const char* arena = current->block->arena.get();
    const bool shared = within(arena, kSharedArena);
    if (shared) {
        shared_access(static_cast<std::size_t>(place - arena), bytes, kind != Kind::Read, caller);
    } else {
        global_access(place, bytes, kind, caller);
    }
    traffic::record(address, bytes, kind != Kind::Read, shared, caller);
}

}  // namespace

void launch_begins() {
    history.began = tick();
    history.accesses = 0;
    history.early = false;
    running_since = running_since_of[now.launch->stream];
    history.blocks.assign(std::size_t{now.launch->grid[0]} * now.launch->grid[1] * now.launch->grid[2], {});
    history.atomics.clear();
}

void launch_ends() {
    running_since_of[now.launch->stream] = !now.launch->overlapping ? kAnything
                                           : history.early          ? running_since
                                                                    : history.began;
    if (history.accesses != 0) return;
    stop({kLaunchFailure,
          nullptr,
          nullptr,
          {},
          "a strict launch saw no access to memory: the file of this kernel was compiled without "
          "-fsanitize=thread, or another file's copy of it was linked"});
}

void block_begins(Block& block) {
    block.began = block.shared_ordered = block.global_ordered = tick();
    traffic::block_begins(block);
}

void block_ends(Block& block) { traffic::block_ends(block); }

void barrier_passed(Block& block, Scope scope) {
    block.shared_ordered = tick();
    if (scope != Scope::Global) return;
    block.global_ordered = block.shared_ordered;
    history.blocks[block.number].barriers.push_back(block.shared_ordered);
}

void wave_passed(Block&, Wave& wave) { wave.ordered = tick(); }

void fenced() { history.blocks[current->block->number].fences.push_back({current->index, tick()}); }

void next_may_begin() { history.early |= !current->waited; }

void atomic(const void* address, const void* caller) {
    access(address, sizeof(unsigned), Kind::Atomic, caller);
    history.atomics.push_back({address, me(), tick()});
}

void reads(const void* address, std::size_t bytes, const void* caller) { access(address, bytes, Kind::Read, caller); }
void writes(const void* address, std::size_t bytes, const void* caller) { access(address, bytes, Kind::Write, caller); }

void copy_begins(const Copy& copy) {
    access(copy.from, sizeof *copy.from, Kind::Read, copy.caller);
    access(copy.to, sizeof *copy.to, Kind::Write, copy.caller);
    if (now.card->background_copies) mark_landing(copy, true);
}

void copy_lands(const Copy& copy) {
    if (now.card->background_copies) mark_landing(copy, false);
}

void arrivals_expected(Expected& expected, const void* caller) {
    Block& block = *current->block;
    shared_access(expected.offset, sizeof(Arrivals), true, caller);
    for (std::size_t i = 0; i < sizeof(Arrivals) / 4; ++i)
        block.words[expected.offset / 4 + i].landing = kHoldsArrivals;
    expected.waited.assign(block.threads.size(), 0);
    expected.time = now.clock;
    history.accesses += 1;
}

void arrivals_used(const Expected& expected, const char* did, const void* caller) {
    const unsigned thread = expected.thread->index;
    const bool before_cluster_wait = expected.arrived < current->passed;  // and so before this thread's
    if (thread == current->index || before_cluster_wait || shared_ordered(expected.time, thread)) return;
    stop_here(kLaunchFailure, caller,
              std::string(did) + " arrivals that thread " + std::to_string(thread) +
                  " has expected, with no barrier between");
}

void arrivals_waited(Expected& expected) {
    if (!expected.awaited) expected.first = current->index;
    std::uint64_t& waited = expected.waited[current->index];
    if (waited == 0) waited = now.clock;
}

void bulk_copy_begins(const Delivery& delivery, const void* caller) {
    if (delivery.bytes == 0) return;
    arrivals_used(current->block->expected[delivery.expected], "copies for", caller);
    access(delivery.from, delivery.bytes, Kind::Read, caller);
    shared_access(delivery.offset, delivery.bytes, true, caller);
    mark_delivery(*current->block, delivery);
}

void send_begins(Block& to, const Delivery& delivery, const void* caller) {
    if (&to == current->block) {
        shared_access(delivery.offset, delivery.bytes, true, caller);
    } else {
        check_send(to, delivery, caller);
    }
    mark_delivery(to, delivery);
}

}  // namespace strata::sim::watch
