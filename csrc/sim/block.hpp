// The state of the blocks that a launch has resident: shared by the executor, which moves it, and the strict card's
// detectors, which look at it.
#pragma once

#include <array>
#include <boost/context/fiber.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sim/executor.hpp"
#include "sim/memory.hpp"
#include "sim/primitives.hpp"

namespace strata::sim {

inline constexpr std::size_t kStackBytes = 64 * 1024;
inline constexpr std::size_t kSharedArena = 256 * 1024;  // of a block; more than any card has
inline constexpr std::size_t kArenaGuard = 4 * 1024;     // of it, past the last piece

struct Block;
struct Cluster;
struct Thread;

struct Copy {
    Float4* to;
    const Float4* from;
    unsigned group;
    const void* caller;
};

// Bytes that a block waits for, brought by bulk copies and by other blocks of its cluster: what an Arrivals object of
// its shared memory stands for, from the call that expects them.
struct Expected {
    std::size_t offset;    // of the object
    unsigned bytes;        // in all
    unsigned begun = 0;    // of them: on their way, or here
    unsigned here = 0;     // of them
    bool sent = false;     // some of them, by a block
    bool awaited = false;  // a thread waited until they were here
    const Thread* thread;  // that expects them
    unsigned arrived;      // the cluster's barriers that it had arrived at by then
    const void* caller;
    std::uint64_t time;
    std::vector<std::uint64_t> waited;  // when each thread of the block did; the strict card's
    unsigned first = 0;                 // the first thread that did
};

struct Delivery {
    std::size_t offset;  // where it goes
    unsigned bytes;
    unsigned expected;  // which of the block's
    const void* from;   // of a bulk copy; null: `value`
    std::array<unsigned char, 16> value;
    bool late;  // until somebody waits
};

enum class State { Ready, AtBarrier, AtWaveBarrier, AtShuffle, AtClusterBarrier, AtArrivals, Finished };

struct Thread {
    boost::context::fiber self;  // where it was suspended
    boost::context::fiber hub;   // where the scheduler was, while the thread runs
    char* stack = nullptr;
    Block* block = nullptr;
    unsigned index = 0;  // in the block
    unsigned lane = 0;   // in the wave
    State state = State::Ready;
    bool yielded = false;
    Scope scope = Scope::Global;   // of the barrier where it waits
    Place place{};                 // and where that stands
    const void* caller = nullptr;  // of the shuffle where it waits
    std::uint32_t shuffled = 0;
    unsigned copy_group = 0;
    std::vector<Copy> copies;
    bool waited = false;    // for the launch ahead
    unsigned arrived = 0;   // at so many barriers of the cluster
    unsigned passed = 0;    // and has waited for so many
    Place cluster_place{};  // of the last call of either half
    unsigned expected = 0;  // which of the block's it waits for
};

// Lanes of a wave that have called the same shuffle, until all that its mask names are there.
struct Meeting {
    Shuffle kind;
    std::uint64_t lanes;
    std::uint64_t here;
    int operand;  // all lanes' but for Index, where each names a lane of its own
    int width;
    std::array<std::uint32_t, 64> value;
    std::array<int, 64> index;

    Meeting() {}  // thousands begin in each launch: nothing is cleared that is written before it is read
    void begin(Shuffle kind_, std::uint64_t lanes_, int operand_, int width_) {
        kind = kind_;
        lanes = lanes_;
        here = 0;
        operand = operand_;
        width = width_;
    }
};

struct Wave {
    std::uint64_t left = 0;  // lanes that have finished
    std::vector<Meeting> meetings;
    unsigned at_barrier = 0;
    std::uint64_t ordered = 0;  // when its last wave barrier completed
};

// Where the static pieces of shared memory are is one for all blocks of a launch.
struct StaticPiece {
    const void* key;
    std::size_t offset;
    std::size_t bytes;
};

// What a strict launch knows of one word of shared memory.
struct SharedWord {
    std::uint64_t written = 0;
    std::uint64_t read = 0;
    std::uint16_t writer = 0;
    std::uint16_t reader = 0;       // kMany: more than one
    std::uint16_t reader_wave = 0;  // kMany: more than one
    std::uint8_t bytes = 0;         // a bit for each byte that was ever written
    std::uint8_t landing = 0;       // what is on its way here: see below
};
inline constexpr std::uint16_t kMany = 0xffff;
// SharedWord::landing. Up to kMostExpected: one more than the number of the Expected that bring the word, until a
// thread writes it that knows them to be here.
inline constexpr std::uint8_t kNothingLands = 0;
inline constexpr std::uint8_t kCopyLands = 0xff;      // a copy in the background
inline constexpr std::uint8_t kHoldsArrivals = 0xfe;  // nothing, but the word is part of an Arrivals object
inline constexpr std::size_t kMostExpected = 0xfd;

struct Block {
    std::array<unsigned, 3> index{};
    unsigned number = 0;  // of the launch's blocks
    std::vector<Thread> threads;
    std::vector<Wave> waves;
    std::vector<Thread*> ready;
    unsigned alive = 0;
    unsigned at_barrier = 0;
    std::unique_ptr<char[]> arena;    // the dynamic piece from its start, static pieces before its guard
    std::vector<StaticPiece> pieces;  // that it has begun to use
    Cluster* cluster = nullptr;
    unsigned rank = 0;  // in it
    std::vector<Expected> expected;
    std::vector<Delivery> deliveries;  // on their way
    std::uint64_t began = 0;
    std::uint64_t shared_ordered = 0;  // when its last barrier of any kind completed
    std::uint64_t global_ordered = 0;  // and the last one that orders global memory
    std::unique_ptr<SharedWord[]> words;
};

// Blocks that are resident together until the last has finished. Of a launch without clusters, each block is one.
struct Cluster {
    Block* const* blocks = nullptr;  // by rank
    unsigned running = 0;            // of them
    unsigned at_barrier = 0;         // threads that have arrived at the barrier that is next
    unsigned begun = 0;              // barriers that a thread has arrived at
    unsigned complete = 0;           // and that all threads have
    const Thread* left = nullptr;    // a thread that finished, of those that did the one with the fewest arrivals
};

// Where a thread did what it may not.
struct Trouble {
    int code = 0;
    const Thread* thread = nullptr;
    const void* caller = nullptr;  // or else `place`
    Place place{};
    std::string what;
};

struct Running {
    const Card* card = nullptr;
    const Launch* launch = nullptr;
    Memory* memory = nullptr;
    std::vector<StaticPiece> pieces;  // of shared memory, that any block has asked for
    std::size_t static_bytes = 0;     // which these take
    std::uint64_t clock = 1;          // counts the events that order memory; never goes back
    bool stopped = false;
    Trouble trouble;
};

extern Running now;
// Null: host code runs. A thread's own, since host code of instrumented files may run beside a launch.
extern __thread Thread* current __attribute__((tls_model("initial-exec")));

// Ends the launch; the first call counts. `stop_here` is for the running thread, which does not come back from it.
void stop(Trouble trouble);
[[noreturn]] void stop_here(Trouble trouble);
[[noreturn]] inline void stop_here(int code, const void* caller, std::string what) {
    stop_here({code, nullptr, caller, {}, std::move(what)});
}

std::string block_name(const std::array<unsigned, 3>& index);
std::array<unsigned, 3> block_at(unsigned number);

// Whether the bytes lie in one piece of a block's shared memory.
inline bool in_shared_piece(std::size_t offset, std::size_t bytes) {
    if (offset > kSharedArena || bytes > kSharedArena) return false;
    if (offset + bytes <= now.launch->shared_bytes) return true;
    for (const StaticPiece& piece : now.pieces) {
        if (offset >= piece.offset && offset + bytes <= piece.offset + piece.bytes) return true;
    }
    return false;
}

inline Wave& wave_of(Thread& t) { return t.block->waves[t.index / static_cast<unsigned>(now.card->lanes)]; }
inline unsigned wave_number(unsigned thread) { return thread / static_cast<unsigned>(now.card->lanes); }

}  // namespace strata::sim
