#include "sim/executor.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "sim/block.hpp"
#include "sim/source_line.hpp"
#include "sim/watch.hpp"

namespace strata::sim {

Running now;
__thread Thread* current __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

namespace context = boost::context;

// Blocks that are resident at once: from one to this many, as the seed says.
constexpr unsigned kMostResident = 6;

// Turns that threads give up in a row, with nothing else happening, before a launch is taken to wait for ever.
constexpr unsigned kPatience = 1u << 22;

class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull) {
        for (int i = 0; i < 8; ++i) below(2);
    }
    // xorshift64; the upper half has the better bits.
    unsigned below(std::size_t limit) {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return static_cast<unsigned>(((state_ >> 32) * limit) >> 32);
    }

  private:
    std::uint64_t state_;
};

unsigned lanes() { return static_cast<unsigned>(now.card->lanes); }

void suspend() { current->hub = std::move(current->hub).resume(); }

void make_ready(Thread& t) {
    t.state = State::Ready;
    t.block->ready.push_back(&t);
}

std::string at(Place place) { return project_path(place.file) + ":" + std::to_string(place.line); }

std::string thread_number(const Thread& t) { return "thread " + std::to_string(t.index); }

std::string waits_where(const Thread& t) {
    switch (t.state) {
        case State::AtBarrier:
        case State::AtWaveBarrier:
            return thread_number(t) + " waits at the barrier " + at(t.place);
        case State::AtShuffle:
            return thread_number(t) + " waits in a shuffle";
        case State::AtClusterBarrier:
            return thread_number(t) + " waits at the cluster's barrier " + at(t.cluster_place);
        case State::AtArrivals:
            return thread_number(t) + " waits for arrivals";
        case State::Finished:
            return thread_number(t) + " has left the kernel";
        default:
            return thread_number(t) + " has not come so far";
    }
}

void stop_at_barrier(const Thread& t, const std::string& what) { stop({719, &t, nullptr, t.place, what}); }
void stop_at_shuffle(const Thread& t, const std::string& what) { stop({719, &t, t.caller, {}, what}); }

// ---------------------------------------------------------------------------------------------------------------------
// Barriers

// Lets the block go on where all its threads are at one barrier. An error where some never can be.
void check_barrier(Block& block) {
    if (block.at_barrier == 0 || block.at_barrier < block.alive) return;
    const Thread* first = nullptr;
    for (const Thread& t : block.threads) {
        if (first == nullptr && t.state == State::AtBarrier) first = &t;
    }
    for (const Thread& t : block.threads) {
        if (t.state == State::AtBarrier && t.place.line == first->place.line && t.scope == first->scope &&
            std::strcmp(t.place.file, first->place.file) == 0) {
            continue;
        }
        return stop_at_barrier(*first, "waits at a barrier that part of the block does not reach: " + waits_where(t));
    }
    block.at_barrier = 0;
    watch::barrier_passed(block, first->scope);
    for (Thread& t : block.threads) make_ready(t);
}

void check_wave_barrier(Thread& t) {
    Wave& wave = wave_of(t);
    if (wave.at_barrier == 0) return;
    const unsigned first = t.index - t.lane;
    const unsigned end = std::min(first + lanes(), now.launch->block);
    const Thread* waiting = nullptr;
    for (unsigned i = first; i < end; ++i) {
        if (t.block->threads[i].state == State::AtWaveBarrier) waiting = &t.block->threads[i];
    }
    if (wave.left != 0) return stop_at_barrier(*waiting, "waits at a wave barrier that a lane of its wave has left");
    if (wave.at_barrier < end - first) return;
    wave.at_barrier = 0;
    watch::wave_passed(*t.block, wave);
    for (unsigned i = first; i < end; ++i) make_ready(t.block->threads[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Shuffles

Thread& lane_of(Block& block, unsigned wave, unsigned lane) { return block.threads[wave * lanes() + lane]; }

std::string mask_text(std::uint64_t mask) {
    char text[32];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(mask));
    return text;
}

unsigned source_lane(const Meeting& m, unsigned lane) {
    const unsigned width = static_cast<unsigned>(m.width);
    const unsigned operand = static_cast<unsigned>(m.operand);
    const unsigned first = lane / width * width;
    const unsigned end = first + width;
    switch (m.kind) {
        case Shuffle::Xor:
            return (lane ^ operand) < end ? lane ^ operand : lane;
        case Shuffle::Down:
            return lane + operand < end ? lane + operand : lane;
        case Shuffle::Up:
            return lane >= first + operand ? lane - operand : lane;
        default:
            return first + static_cast<unsigned>(m.index[lane]) % width;
    }
}

// A lane has left: an error where a shuffle still waits for it.
void check_left(Thread& gone) {
    Wave& wave = wave_of(gone);
    for (const Meeting& m : wave.meetings) {
        if ((m.lanes & wave.left) == 0) continue;
        for (unsigned lane = 0; lane < lanes(); ++lane) {
            if (((m.here >> lane) & 1) == 0) continue;
            return stop_at_shuffle(lane_of(*gone.block, wave_number(gone.index), lane),
                                   "shuffles with lane " + std::to_string(gone.lane) + " (thread " +
                                       std::to_string(gone.index) + "), which has left the kernel");
        }
    }
}

// All lanes of the meeting are there: each gets its value.
void exchange(Block& block, unsigned wave_index, std::size_t which) {
    Wave& wave = block.waves[wave_index];
    const Meeting& m = wave.meetings[which];
    for (unsigned lane = 0; lane < lanes(); ++lane) {
        if (((m.lanes >> lane) & 1) == 0) continue;
        Thread& t = lane_of(block, wave_index, lane);
        const unsigned from = source_lane(m, lane);
        if (((m.lanes >> from) & 1) == 0) {
            return stop_at_shuffle(t, "shuffles with lane " + std::to_string(from) + ", which its mask " +
                                          mask_text(m.lanes) + " does not name");
        }
        t.shuffled = m.value[from];
        make_ready(t);
    }
    std::swap(wave.meetings[which], wave.meetings.back());
    wave.meetings.pop_back();
}

// ---------------------------------------------------------------------------------------------------------------------
// Clusters

// When bytes land. Not the scheduler's numbers, so that launches without such bytes do not need them.
Random chance(0);

std::string name_of(const Block& block) { return "block " + block_name(block.index); }

// The first thread of the cluster, by block, of which this is true; null: of none.
template <class Test>
Thread* find_thread(const Cluster& cluster, Test test) {
    for (unsigned rank = 0; rank < now.launch->cluster; ++rank) {
        for (Thread& t : cluster.blocks[rank]->threads) {
            if (test(t)) return &t;
        }
    }
    return nullptr;
}

Trouble unreached(const Thread& waiting, const Thread& other) {
    return {719, &waiting, nullptr, waiting.cluster_place,
            "is at a barrier that part of its cluster does not reach: of " + name_of(*other.block) + " " +
                waits_where(other)};
}

// A thread has finished: an error where a barrier of its cluster needs it.
void check_cluster_left(const Thread& gone) {
    Cluster& cluster = *gone.block->cluster;
    if (gone.arrived != gone.passed) {
        return stop({719, &gone, nullptr, gone.cluster_place, "leaves the kernel without cluster_wait()"});
    }
    if (cluster.left == nullptr || gone.arrived < cluster.left->arrived) cluster.left = &gone;
    if (gone.arrived == cluster.begun) return;
    const Thread* waiting = find_thread(cluster, [&](const Thread& t) { return t.arrived > gone.arrived; });
    stop(unreached(*waiting, gone));
}

// Which of the block's `expected` is of the object at `offset`; kNone: there is none.
constexpr unsigned kNone = ~0u;
unsigned find_expected(const Block& block, std::size_t offset) {
    for (unsigned i = 0; i < block.expected.size(); ++i) {
        if (block.expected[i].offset == offset) return i;
    }
    return kNone;
}

void arrive(Block& block, const Delivery& delivery) {
    const void* from = delivery.from != nullptr ? delivery.from : delivery.value.data();
    std::memcpy(block.arena.get() + delivery.offset, from, delivery.bytes);
    block.expected[delivery.expected].here += delivery.bytes;
}

template <class Test>
void arrive_those(Block& block, Test test) {
    auto& all = block.deliveries;
    const auto rest = std::partition(all.begin(), all.end(), test);
    std::for_each(all.begin(), rest, [&](const Delivery& delivery) { arrive(block, delivery); });
    all.erase(all.begin(), rest);
}

// Some of what need not be late.
void arrive_some(Block& block) {
    arrive_those(block, [](const Delivery& delivery) { return !delivery.late && chance.below(4) == 0; });
}

// All threads of the block have finished.
void check_awaited(const Block& block) {
    for (const Expected& e : block.expected) {
        if (e.awaited || e.bytes == 0) continue;
        return stop({719,
                     e.thread,
                     e.caller,
                     {},
                     "expects arrivals that no thread of its block has waited for when the last one leaves the "
                     "kernel: " +
                         std::to_string(e.bytes - e.here) + " of " + std::to_string(e.bytes) +
                         " bytes are on their way or still to be sent"});
    }
}

void stop_missing(const Thread& t) {
    const Expected& e = t.block->expected[t.expected];
    stop({702,
          &t,
          t.caller,
          {},
          "waits for ever for arrivals: " + std::to_string(e.bytes - e.begun) + " of " + std::to_string(e.bytes) +
              " bytes are missing"});
}

// ---------------------------------------------------------------------------------------------------------------------
// Blocks

// The fiber's memory outlives it: nothing to take or to give back.
struct BorrowedStack {
    context::stack_context allocate() { return {}; }
    void deallocate(context::stack_context&) noexcept {}
};

context::fiber start(Thread& t) {
    context::stack_context stack;
    stack.sp = t.stack + kStackBytes;
    stack.size = kStackBytes;
    return context::fiber(std::allocator_arg, context::preallocated(stack.sp, stack.size, stack), BorrowedStack{},
                          [&t](context::fiber&& hub) {
                              t.hub = std::move(hub);
                              now.launch->enter(now.launch->kernel, now.launch->arguments);
                              t.state = State::Finished;
                              return std::move(t.hub);
                          });
}

// Forgets the fiber of a thread that was abandoned: what is on its stack must not be unwound.
void forget(Thread& t) { new (&t.self) context::fiber(); }

void begin(Block& block, unsigned number) {
    block.index = block_at(number);
    block.number = number;
    block.alive = now.launch->block;
    block.at_barrier = 0;
    block.pieces.clear();
    block.expected.clear();
    block.deliveries.clear();
    // Whatever was there before; a number that shows in any sum.
    std::memset(block.arena.get(), 0x7f, now.launch->shared_bytes);
    block.waves.assign(wave_number(now.launch->block - 1) + 1, {});
    block.ready.clear();
    for (Thread& t : block.threads) {
        t.copies.clear();
        t.copy_group = 0;
        t.waited = false;
        t.arrived = t.passed = 0;
        t.self = start(t);
        make_ready(t);
    }
    watch::block_begins(block);
}

void begin(Cluster& cluster, unsigned number) {
    const unsigned blocks = now.launch->cluster;
    cluster = {cluster.blocks, blocks, 0, 0, 0, nullptr};
    for (unsigned rank = 0; rank < blocks; ++rank) begin(*cluster.blocks[rank], number * blocks + rank);
}

// One turn of a thread: until it waits, gives up its turn, or leaves. True where it gave up its turn.
bool run(Thread& t) {
    current = &t;
    t.self = std::move(t.self).resume();
    current = nullptr;
    if (t.state != State::Finished) return std::exchange(t.yielded, false);
    t.block->alive -= 1;
    wave_of(t).left |= std::uint64_t{1} << t.lane;
    check_left(t);
    check_wave_barrier(t);
    check_barrier(*t.block);
    check_cluster_left(t);
    return false;
}

// Stacks and blocks, kept from launch to launch.
class Pool {
  public:
    // `count` blocks of the launch's size, whose fibers are not started.
    std::vector<Block*> blocks(std::size_t count) {
        while (blocks_.size() < count) {
            blocks_.push_back(std::make_unique<Block>());
            Block& block = *blocks_.back();
            block.arena.reset(new (std::align_val_t{256}) char[kSharedArena]);
            if (watch::kStrict) block.words = std::make_unique<SharedWord[]>(kSharedArena / 4);
        }
        std::vector<Block*> out;
        std::size_t next_stack = 0;
        for (std::size_t b = 0; b < count; ++b) {
            Block& block = *blocks_[b];
            for (Thread& t : block.threads) forget(t);
            if (block.threads.size() != now.launch->block) block.threads = std::vector<Thread>(now.launch->block);
            for (unsigned i = 0; i < now.launch->block; ++i) {
                Thread& t = block.threads[i];
                t.stack = stack(next_stack++);
                t.block = &block;
                t.index = i;
                t.lane = i % lanes();
                t.yielded = false;
            }
            out.push_back(&block);
        }
        return out;
    }

  private:
    // A guard page lies below each stack. Stacks that began at equal distances would share a few sets of the
    // processor's caches; an odd number of lines between them spreads them.
    static constexpr std::size_t kPage = 4096;
    static constexpr std::size_t kStagger = 17 * 64;
    static constexpr std::size_t kStride = kPage + kStackBytes + 8 * kPage;
    static constexpr std::size_t kStacks = std::max(kMostResident, kMostInCluster) * 1024;

    char* stack(std::size_t index) {
        if (memory_ == nullptr) {
            void* memory = mmap(nullptr, kStacks * kStride, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (memory == MAP_FAILED) std::abort();
            memory_ = static_cast<char*>(memory);
        }
        char* base = memory_ + index * kStride;
        if (index == guarded_) {
            mprotect(base, kPage, PROT_NONE);
            ++guarded_;
        }
        return base + kPage + index * kStagger % (8 * kPage);
    }

    std::vector<std::unique_ptr<Block>> blocks_;
    char* memory_ = nullptr;
    std::size_t guarded_ = 0;
};

Pool& pool() {
    static Pool* const kept = new Pool;  // abandoned fibers are never unwound, at exit neither
    return *kept;
}

// The first thread of the resident blocks that waits so; null: there is none.
const Thread* find_waiting(const std::vector<Block*>& resident, State state) {
    for (const Block* block : resident) {
        for (const Thread& t : block->threads) {
            if (t.state == state) return &t;
        }
    }
    return nullptr;
}

// Threads give up their turns, and nothing else happens.
void stop_impatiently(const Thread& t, const std::vector<Block*>& resident) {
    if (const Thread* waiting = find_waiting(resident, State::AtArrivals)) return stop_missing(*waiting);
    stop({702, &t, t.caller, {}, "waits for another block, for ever"});
}

// No thread can go on.
void stop_deadlocked(const std::vector<Block*>& resident) {
    if (const Thread* t = find_waiting(resident, State::AtArrivals)) return stop_missing(*t);
    if (const Thread* t = find_waiting(resident, State::AtClusterBarrier)) {
        const Thread* other = find_thread(*t->block->cluster, [&](const Thread& o) { return o.arrived < t->arrived; });
        return stop(unreached(*t, *other));
    }
    const Thread* waiting = nullptr;
    std::string others;
    int named = 0;
    for (const Block* block : resident) {
        for (const Thread& t : block->threads) {
            if (t.state == State::Finished) continue;
            if (waiting == nullptr) {
                waiting = &t;
            } else if (t.block == waiting->block && t.state != waiting->state && named++ == 0) {
                others = ": " + waits_where(t);
            }
        }
    }
    if (waiting->state == State::AtShuffle) {
        stop_at_shuffle(*waiting, "waits for ever in a shuffle that lanes of its mask do not reach" + others);
    } else {
        stop_at_barrier(*waiting, "waits at a barrier that part of the block does not reach" + others);
    }
}

void run_blocks(std::uint64_t seed) {
    Random random(seed);
    const Launch& launch = *now.launch;
    chance = Random(~seed);
    std::vector<unsigned> order(std::size_t{launch.grid[0]} * launch.grid[1] * launch.grid[2] / launch.cluster);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<unsigned>(i);
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);

    std::size_t next = 0;
    const unsigned most = std::max(1u, kMostResident / launch.cluster);
    std::vector<Cluster> clusters(std::min<std::size_t>(order.size(), 1 + random.below(most)));
    const std::vector<Block*> blocks = pool().blocks(clusters.size() * launch.cluster);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        blocks[i]->cluster = &clusters[i / launch.cluster];
        blocks[i]->rank = static_cast<unsigned>(i % launch.cluster);
    }
    for (std::size_t i = 0; i < clusters.size(); ++i) {
        clusters[i].blocks = &blocks[i * launch.cluster];
        begin(clusters[i], order[next++]);
    }
    std::vector<Block*> resident = blocks;
    unsigned yields = 0;
    while (!resident.empty()) {
        std::size_t pick = random.below(resident.size());
        for (std::size_t tries = 0; resident[pick]->ready.empty(); ++tries) {
            if (tries == resident.size()) return stop_deadlocked(resident);
            pick = (pick + 1) % resident.size();
        }
        Block& block = *resident[pick];
        if (!block.deliveries.empty()) arrive_some(block);
        // Some turns of one block, so that its memory stays in the processor's caches for a while.
        for (unsigned turns = 1 + random.below(2 * launch.block); turns > 0 && !block.ready.empty(); --turns) {
            const unsigned which = random.below(block.ready.size());
            Thread& t = *block.ready[which];
            block.ready[which] = block.ready.back();
            block.ready.pop_back();
            yields = run(t) ? yields + 1 : 0;
            if (yields > kPatience) stop_impatiently(t, resident);
            if (now.stopped) return;
        }
        if (block.alive > 0) continue;
        check_awaited(block);
        if (now.stopped) return;
        watch::block_ends(block);
        Cluster& cluster = *block.cluster;
        if (--cluster.running > 0) continue;  // what it has in shared memory stays
        if (next < order.size()) {
            begin(cluster, order[next++]);
        } else {
            const auto first = resident.begin() + static_cast<std::ptrdiff_t>(pick - block.rank);
            resident.erase(first, first + launch.cluster);
        }
    }
}

std::string fault_text(const Trouble& trouble) {
    std::string text = function_name(now.launch->kernel);
    if (trouble.thread != nullptr) {
        text += ", block " + block_name(trouble.thread->block->index) + ", " + thread_number(*trouble.thread);
        if (trouble.caller != nullptr) {
            text += ", " + source_line(trouble.caller);
        } else if (trouble.place.file != nullptr) {
            text += ", " + at(trouble.place);
        }
    }
    return text + ": " + trouble.what;
}

}  // namespace

std::array<unsigned, 3> block_at(unsigned number) {
    const auto& grid = now.launch->grid;
    return {number % grid[0], number / grid[0] % grid[1], number / grid[0] / grid[1]};
}

std::string block_name(const std::array<unsigned, 3>& index) {
    return "(" + std::to_string(index[0]) + "," + std::to_string(index[1]) + "," + std::to_string(index[2]) + ")";
}

void stop(Trouble trouble) {
    if (now.stopped) return;
    now.stopped = true;
    now.trouble = std::move(trouble);
}

void stop_here(Trouble trouble) {
    trouble.thread = current;
    stop(std::move(trouble));
    suspend();
    std::abort();  // an abandoned thread is never resumed
}

bool execute(const Card& card, Memory& memory, const Launch& launch, std::uint64_t seed, Fault* fault) {
    now.card = &card;
    now.memory = &memory;
    now.launch = &launch;
    now.stopped = false;
    now.pieces.clear();
    now.static_bytes = 0;
    watch::launch_begins();
    run_blocks(seed);
    if (!now.stopped) watch::launch_ends();
    if (now.stopped) *fault = {now.trouble.code, fault_text(now.trouble)};
    now.trouble = {};
    return !now.stopped;
}

// ---------------------------------------------------------------------------------------------------------------------
// What kernels call

namespace {

// Lets others run before an access that they can see.
void yield(const void* caller) {
    current->caller = caller;
    current->yielded = true;
    make_ready(*current);
    suspend();
}

void land(const Copy& copy) {
    watch::copy_lands(copy);
    *copy.to = *copy.from;
}

void check_aligned(const void* address, std::size_t bytes, const void* caller) {
    if (reinterpret_cast<std::uintptr_t>(address) % bytes == 0) return;
    stop_here(now.card->vendor == GrBackend::Cuda ? 716 : 700, caller,
              "a " + std::to_string(bytes) + "-byte access is not aligned to its size");
}

void* begin_piece(Block& block, const StaticPiece& piece) {
    block.pieces.push_back(piece);
    return std::memset(block.arena.get() + piece.offset, 0x7f, piece.bytes);
}

// What is sent to a block may be there before any of its threads asks for the piece of shared memory.
void begin_piece_at(Block& block, std::size_t offset) {
    const auto holds = [&](const StaticPiece& piece) {
        return offset >= piece.offset && offset < piece.offset + piece.bytes;
    };
    if (std::any_of(block.pieces.begin(), block.pieces.end(), holds)) return;
    const auto known = std::find_if(now.pieces.begin(), now.pieces.end(), holds);
    if (known != now.pieces.end()) begin_piece(block, *known);
}

// Where `address`, with `bytes` behind it, is in the block's shared memory.
std::size_t shared_offset(const void* address, std::size_t bytes, const char* what, const void* caller) {
    const std::size_t offset =
        reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(current->block->arena.get());
    if (!in_shared_piece(offset, bytes)) {
        stop_here(700, caller, std::string(what) + " outside of its block's shared memory");
    }
    return offset;
}

std::size_t arrivals_offset(const Arrivals& arrivals, const void* caller) {
    if (!now.card->clusters) stop_here(719, caller, "asks for what a card without clusters does not have");
    check_aligned(&arrivals, sizeof arrivals, caller);
    return shared_offset(&arrivals, sizeof arrivals, "has arrivals", caller);
}

[[noreturn]] void refuse(const char* did, const Block& to, const std::string& why, const void* caller) {
    stop_here(719, caller, did + (" to " + name_of(to)) + why);
}

// What is the same of bulk copies and of what is sent.
void check_delivery(const char* did, const Block& to, const Delivery& delivery, const void* caller) {
    if (delivery.expected == kNone) refuse(did, to, ", where nobody has expected these arrivals", caller);
    const Expected& e = to.expected[delivery.expected];
    if (delivery.bytes > e.bytes - e.begun) {
        refuse(did, to,
               " " + std::to_string(delivery.bytes) + " bytes, where " + std::to_string(e.bytes - e.begun) + " of " +
                   std::to_string(e.bytes) + " expected ones are still to come",
               caller);
    }
    for (const Expected& other : to.expected) {
        if (other.offset < delivery.offset + delivery.bytes && delivery.offset < other.offset + sizeof(Arrivals)) {
            refuse(did, to, ", over arrivals", caller);
        }
    }
}

void begin_delivery(Block& to, const Delivery& delivery) {
    to.deliveries.push_back(delivery);
    to.deliveries.back().late = chance.below(2) == 0;
    Expected& e = to.expected[delivery.expected];
    e.begun += delivery.bytes;
    if (e.begun < e.bytes) return;
    for (Thread& t : to.threads) {
        if (t.state == State::AtArrivals && t.expected == delivery.expected) make_ready(t);
    }
}

void begin_copy(void* shared, const void* global, unsigned bytes, Arrivals& arrivals, const void* caller) {
    const std::size_t object = arrivals_offset(arrivals, caller);
    Block& block = *current->block;
    check_aligned(shared, 16, caller);
    check_aligned(global, 16, caller);
    if (bytes % 16 != 0) stop_here(716, caller, "copies " + std::to_string(bytes) + " bytes, no multiple of 16");
    const std::size_t offset = shared_offset(shared, bytes, "copies", caller);
    const Delivery delivery{offset, bytes, find_expected(block, object), global, {}, false};
    check_delivery("copies", block, delivery, caller);
    watch::bulk_copy_begins(delivery, caller);
    begin_delivery(block, delivery);
}

}  // namespace

unsigned thread_index(int axis) { return axis == 0 ? current->index : 0; }
unsigned block_index(int axis) { return current->block->index[static_cast<std::size_t>(axis)]; }
unsigned block_threads(int axis) { return axis == 0 ? now.launch->block : 1; }
unsigned grid_blocks(int axis) { return now.launch->grid[static_cast<std::size_t>(axis)]; }
unsigned wave_lane() { return current->lane; }

Float4* dynamic_shared() { return reinterpret_cast<Float4*>(current->block->arena.get()); }

void* static_shared(const void* key, std::size_t bytes) {
    Block& block = *current->block;
    for (const StaticPiece& piece : block.pieces) {
        if (piece.key == key) return block.arena.get() + piece.offset;
    }
    const auto known =
        std::find_if(now.pieces.begin(), now.pieces.end(), [&](const StaticPiece& piece) { return piece.key == key; });
    if (known != now.pieces.end()) return begin_piece(block, *known);
    now.static_bytes += (bytes + 15) / 16 * 16;
    if (now.static_bytes + now.launch->shared_bytes > now.card->shared_most) {
        stop_here(701, __builtin_return_address(0),
                  "the block's shared memory, " + std::to_string(now.static_bytes + now.launch->shared_bytes) +
                      " bytes, is more than the card's " + std::to_string(now.card->shared_most));
    }
    now.pieces.push_back({key, kSharedArena - kArenaGuard - now.static_bytes, bytes});
    return begin_piece(block, now.pieces.back());
}

void barrier(Scope scope, Place place) {
    Thread& t = *current;
    t.scope = scope;
    t.place = place;
    if (scope == Scope::Wave) {
        t.state = State::AtWaveBarrier;
        wave_of(t).at_barrier += 1;
        check_wave_barrier(t);
    } else {
        t.state = State::AtBarrier;
        t.block->at_barrier += 1;
        check_barrier(*t.block);
    }
    suspend();
}

void fence() { watch::fenced(); }

void let_next_launch_begin() { watch::next_may_begin(); }
void wait_for_launch_before() { current->waited = true; }

std::uint32_t shuffle(Shuffle kind, std::uint64_t mask, std::uint32_t value, int operand, int width) {
    Thread& t = *current;
    t.caller = __builtin_return_address(0);
    Wave& wave = wave_of(t);
    const std::uint64_t me = std::uint64_t{1} << t.lane;
    const unsigned last = std::min(t.index - t.lane + lanes(), now.launch->block) - (t.index - t.lane) - 1;
    if ((mask & me) == 0) {
        stop_here(719, t.caller,
                  "is lane " + std::to_string(t.lane) + " of its wave, which its own shuffle mask " + mask_text(mask) +
                      " does not name");
    }
    if (mask >> last >> 1 != 0) {
        stop_here(
            719, t.caller,
            "shuffles with mask " + mask_text(mask) + ", and its wave has " + std::to_string(last + 1) + " lanes");
    }
    if (width < 1 || width > now.card->lanes || (width & (width - 1)) != 0 || operand < 0) {
        stop_here(719, t.caller,
                  "shuffles over a width of " + std::to_string(width) + " by " + std::to_string(operand));
    }
    t.state = State::AtShuffle;
    std::size_t which = 0;
    while (which < wave.meetings.size() && (wave.meetings[which].lanes & mask) == 0) ++which;
    if (which == wave.meetings.size()) {
        wave.meetings.emplace_back();
        wave.meetings.back().begin(kind, mask, operand, width);
    }
    Meeting& m = wave.meetings[which];
    if (m.kind != kind || m.lanes != mask || m.width != width || (kind != Shuffle::Index && m.operand != operand)) {
        stop_here(719, t.caller, "meets lanes of its mask that are at another shuffle");
    }
    m.here |= me;
    m.value[t.lane] = value;
    m.index[t.lane] = operand;
    if ((mask & wave.left) != 0) {
        unsigned gone = 0;
        while (((mask & wave.left) >> gone & 1) == 0) ++gone;
        stop_here(719, t.caller, "shuffles with lane " + std::to_string(gone) + ", which has left the kernel");
    }
    if (m.here == m.lanes) exchange(*t.block, wave_number(t.index), which);
    suspend();
    return t.shuffled;
}

unsigned atomic_increment(unsigned* counter, unsigned last) {
    const void* caller = __builtin_return_address(0);
    yield(caller);
    check_aligned(counter, sizeof *counter, caller);
    watch::atomic(counter, caller);
    const unsigned before = *counter;
    *counter = before >= last ? 0 : before + 1;
    return before;
}

float load_past_caches(const float* address) {
    const void* caller = __builtin_return_address(0);
    yield(caller);
    check_aligned(address, sizeof *address, caller);
    watch::reads(address, sizeof *address, caller);
    return *address;
}

Chunk load_chunk(const Chunk* address) {
    check_aligned(address, sizeof *address, __builtin_return_address(0));
    watch::reads(address, sizeof *address, __builtin_return_address(0));
    return *address;
}

Float4 load_float4(const Float4* address) {
    check_aligned(address, sizeof *address, __builtin_return_address(0));
    watch::reads(address, sizeof *address, __builtin_return_address(0));
    return *address;
}

void store_float4(Float4* address, const Float4& value) {
    check_aligned(address, sizeof *address, __builtin_return_address(0));
    watch::writes(address, sizeof *address, __builtin_return_address(0));
    *address = value;
}

Bf16x4 load_bf16x4(const Bf16x4* address) {
    check_aligned(address, sizeof *address, __builtin_return_address(0));
    watch::reads(address, sizeof *address, __builtin_return_address(0));
    return *address;
}

bool copies_in_background() { return now.card->background_copies; }

void copy_async(Float4* shared, const Float4* global) {
    const Copy copy{shared, global, current->copy_group, __builtin_return_address(0)};
    check_aligned(shared, sizeof *shared, copy.caller);
    check_aligned(global, sizeof *global, copy.caller);
    watch::copy_begins(copy);
    if (now.card->background_copies) {
        current->copies.push_back(copy);
    } else {
        land(copy);
    }
}

void copy_async_commit() { current->copy_group += 1; }

void copy_async_wait(int pending) {
    Thread& t = *current;
    const auto still = std::partition(t.copies.begin(), t.copies.end(), [&](const Copy& copy) {
        return copy.group + static_cast<unsigned>(pending) < t.copy_group;
    });
    std::for_each(t.copies.begin(), still, land);
    t.copies.erase(t.copies.begin(), still);
}

void expect_arrivals(Arrivals& arrivals, unsigned bytes) {
    const void* caller = __builtin_return_address(0);
    const std::size_t offset = arrivals_offset(arrivals, caller);
    Block& block = *current->block;
    const unsigned before = find_expected(block, offset);
    if (before != kNone) {
        stop_here(719, caller,
                  "expects arrivals that " + thread_number(*block.expected[before].thread) +
                      " has expected before: once a launch");
    }
    if (block.expected.size() == kMostExpected) {
        stop_here(719, caller,
                  "is to count more arrivals than the simulated card can: " + std::to_string(kMostExpected));
    }
    Expected e{};
    e.offset = offset;
    e.bytes = bytes;
    e.thread = current;
    e.arrived = current->arrived;
    e.caller = caller;
    block.expected.push_back(std::move(e));
    watch::arrivals_expected(block.expected.back(), caller);
}

void cluster_arrive(Place place) {
    Thread& t = *current;
    Cluster& cluster = *t.block->cluster;
    t.cluster_place = place;
    if (!now.card->clusters) stop_here({719, nullptr, nullptr, place, "is on a card without clusters"});
    if (t.arrived != t.passed) {
        stop_here({719, nullptr, nullptr, place, "arrives at its cluster's barrier again without cluster_wait()"});
    }
    t.arrived += 1;
    cluster.begun = std::max(cluster.begun, t.arrived);
    if (cluster.left != nullptr && cluster.left->arrived < t.arrived) {
        stop_here(unreached(t, *cluster.left));
    }
    if (++cluster.at_barrier < now.launch->cluster * now.launch->block) return;
    cluster.at_barrier = 0;
    cluster.complete += 1;
    for (unsigned rank = 0; rank < now.launch->cluster; ++rank) {
        for (Thread& other : cluster.blocks[rank]->threads) {
            if (other.state == State::AtClusterBarrier) make_ready(other);
        }
    }
}

void cluster_wait(Place place) {
    Thread& t = *current;
    t.cluster_place = place;
    if (t.arrived == t.passed) {
        stop_here({719, nullptr, nullptr, place, "waits at its cluster's barrier without cluster_arrive()"});
    }
    if (t.block->cluster->complete < t.arrived) {
        t.state = State::AtClusterBarrier;
        suspend();
    }
    t.passed = t.arrived;
}

void copy_bulk(void* shared, const void* global, unsigned bytes, Arrivals& arrivals) {
    begin_copy(shared, global, bytes, arrivals, __builtin_return_address(0));
}

void copy_row_pieces(void* shared, const RowPieces& rows, int row, int piece, Arrivals& arrivals) {
    const void* caller = __builtin_return_address(0);
    check_aligned(shared, 128, caller);
    if (row < 0 || static_cast<unsigned>(row) >= rows.count || piece < 0 ||
        static_cast<unsigned>(piece) >= rows.pieces) {
        stop_here(719, caller,
                  "copies piece " + std::to_string(piece) + " of row " + std::to_string(row) + ", of " +
                      std::to_string(rows.pieces) + " pieces and " + std::to_string(rows.count) + " rows");
    }
    for (unsigned round = 0; round < rows.rounds; ++round) {
        const std::size_t from =
            (static_cast<std::size_t>(row) * rows.rounds + round) * rows.pieces + static_cast<unsigned>(piece);
        begin_copy(static_cast<char*>(shared) + round * rows.piece_bytes, rows.memory + from * rows.piece_bytes,
                   rows.piece_bytes, arrivals, caller);
    }
}

void send(void* place, int rank, const void* value, unsigned bytes, Arrivals& arrivals) {
    const void* caller = __builtin_return_address(0);
    const std::size_t object = arrivals_offset(arrivals, caller);
    const Thread& t = *current;
    check_aligned(place, bytes, caller);
    const std::size_t offset = shared_offset(place, bytes, "sends", caller);
    if (rank < 0 || static_cast<unsigned>(rank) >= now.launch->cluster) {
        stop_here(719, caller,
                  "sends to block " + std::to_string(rank) + " of its cluster, which has " +
                      std::to_string(now.launch->cluster));
    }
    if (t.passed == 0) stop_here(719, caller, "sends before cluster_wait(): the other block may not have begun");
    Block& to = *t.block->cluster->blocks[rank];
    if (to.alive == 0) refuse("sends", to, ", which has finished", caller);
    Delivery delivery{offset, bytes, find_expected(to, object), nullptr, {}, false};
    std::memcpy(delivery.value.data(), value, bytes);
    check_delivery("sends", to, delivery, caller);
    if (to.expected[delivery.expected].arrived >= t.passed) {
        refuse("sends", to, ", where these arrivals were expected after cluster_arrive()", caller);
    }
    to.expected[delivery.expected].sent = true;
    begin_piece_at(to, offset);
    watch::send_begins(to, delivery, caller);
    begin_delivery(to, delivery);
}

namespace {

void wait_until_here(Arrivals& arrivals, bool copies, const void* caller) {
    const std::size_t object = arrivals_offset(arrivals, caller);
    Thread& t = *current;
    Block& block = *t.block;
    const unsigned which = find_expected(block, object);
    if (which == kNone) stop_here(719, caller, "waits for arrivals that nobody has expected");
    watch::arrivals_used(block.expected[which], "waits for", caller);
    if (block.expected[which].begun < block.expected[which].bytes) {
        t.state = State::AtArrivals;
        t.expected = which;
        t.caller = caller;
        suspend();
    } else {
        yield(caller);
    }
    Expected& e = block.expected[which];
    if (e.here < e.bytes) arrive_those(block, [&](const Delivery& delivery) { return delivery.expected == which; });
    if (copies && e.sent) stop_here(719, caller, "waits with wait_copies() for bytes that a block has sent");
    watch::arrivals_waited(e);
    e.awaited = true;
}

}  // namespace

void wait_arrivals(Arrivals& arrivals) { wait_until_here(arrivals, false, __builtin_return_address(0)); }
void wait_copies(Arrivals& arrivals) { wait_until_here(arrivals, true, __builtin_return_address(0)); }

}  // namespace strata::sim
