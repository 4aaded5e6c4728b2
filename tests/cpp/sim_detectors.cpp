// Each detector of the strict card fires on a small kernel that does what it is for, and says which kernel, block,
// thread and line; and a kernel that does it right passes. The table that it prints is the one in docs/.
#include <cstring>
#include <iomanip>
#include <iostream>
#include <string>

#include "check.hpp"
#include "gpu/vendor.hpp"
#include "sim/runtime.hpp"

namespace strata::gpu {
namespace {

struct Args {
    float* out;         // 1024 floats, nothing written yet
    const float* in;    // 1024 floats, read-only
    unsigned* counter;  // one, zero
};

constexpr int kThreads = 128;

unsigned thread() { return threadIdx.x; }

struct Words {
    float word[kThreads];
};

// ---------------------------------------------------------------------------------------------------------------------
// Right

void all_right_kernel(Args args) {
    auto& shared = block_shared<Words>();
    shared.word[thread()] = args.in[thread()];
    barrier();
    const float neighbour = shared.word[(thread() + 1) % kThreads];
    float sum = neighbour + shuffle_xor(neighbour, 1);
    local_barrier();
    shared.word[thread()] = sum;
    wave_barrier();
    sum = sum + shared.word[thread() ^ 1u];
    args.out[blockIdx.x * kThreads + thread()] = sum;
    fence();
    barrier();
    if (thread() == 0) shared.word[0] = atomic_count(args.counter, 1) == 1 ? 1.0f : 0.0f;
    barrier();
    if (shared.word[0] == 0.0f) return;
    fence();
    const float other = load_from_other_block(args.out + (1 - blockIdx.x) * kThreads + thread());
    args.out[512 + thread()] = other;
}

void copy_right_kernel(Args args) {
    Float4* tile = dynamic_shared();
    const auto* in = reinterpret_cast<const Float4*>(args.in);
    copy_async(tile + thread(), in + thread());
    copy_async_commit();
    copy_async(tile + kThreads + thread(), in + kThreads - 1 - thread());
    copy_async_commit();
    copy_async_wait<1>();
    barrier();
    args.out[thread()] = tile[kThreads - 1 - thread()].x;
    copy_async_wait<0>();
    barrier();
    args.out[kThreads + thread()] = tile[kThreads + (thread() + 1) % kThreads].w;
}

// The first of two overlapping launches, and second ones.
void wait_then_let_kernel(Args args) {
    wait_for_launch_before();
    let_next_launch_begin();
    args.out[blockIdx.x * kThreads + thread()] = args.in[thread()];
}
void let_then_wait_kernel(Args args) {
    let_next_launch_begin();
    wait_for_launch_before();
    args.out[blockIdx.x * kThreads + thread()] = args.in[thread()];
}
void read_ahead_kernel(Args args) {
    const float early = args.in[thread()];
    wait_for_launch_before();
    args.out[512 + blockIdx.x * kThreads + thread()] = early;
}
void read_output_ahead_kernel(Args args) {
    const float early = args.out[thread()];
    wait_for_launch_before();
    args.out[512 + blockIdx.x * kThreads + thread()] = early;
}
void write_ahead_kernel(Args args) {
    args.out[512 + blockIdx.x * kThreads + thread()] = 1.0f;
    wait_for_launch_before();
}

void polite_wait_kernel(Args args) {
    if (blockIdx.x == 0) {
        if (thread() == 0) {
            args.out[0] = 1.0f;
            fence();
            atomic_count(args.counter, 1u << 30);
        }
    } else if (thread() == 0) {
        for (unsigned own = 0; atomic_count(args.counter, 1u << 30) == own; ++own) {
        }
        fence();
        args.out[1] = load_from_other_block(args.out);
    }
}

// In a cluster of two blocks: what each gets from the other, and from global memory.
struct Inbox {
    Arrivals arrivals;
    Arrivals others;
    float value[kThreads];
    Float4 tile[kThreads];
};

int other_rank() { return 1 - static_cast<int>(blockIdx.x % 2); }

__forceinline__ Inbox& open_inbox(unsigned bytes) {
    auto& inbox = block_shared<Inbox>();
    if (thread() == 0) expect_arrivals(inbox.arrivals, bytes);
    wait_for_launch_before();
    cluster_arrive();
    cluster_wait();
    return inbox;
}

void send_right_kernel(Args args) {
    Inbox& inbox = open_inbox(sizeof inbox.value);
    send(&inbox.value[thread()], other_rank(), args.in[thread()], inbox.arrivals);
    wait_arrivals(inbox.arrivals);
    args.out[blockIdx.x * kThreads + thread()] = inbox.value[thread() ^ 64u];
    barrier();
    inbox.value[thread()] = 2.0f;
}

void copy_bulk_right_kernel(Args args) {
    auto& inbox = block_shared<Inbox>();
    wait_for_launch_before();
    if (thread() == 77) {
        expect_arrivals(inbox.arrivals, sizeof inbox.tile);
        copy_bulk(inbox.tile, args.in, 48, inbox.arrivals);
        copy_bulk(inbox.tile + 3, args.in + 12, sizeof inbox.tile - 48, inbox.arrivals);
        wait_arrivals(inbox.arrivals);
    }
    barrier();
    args.out[blockIdx.x * kThreads + thread()] = inbox.tile[thread()].w;
}

// One after the other, the second to itself; in dynamic shared memory.
void send_both_right_kernel(Args args) {
    auto& inbox = block_shared<Inbox>();
    auto* words = reinterpret_cast<Bf16x4*>(dynamic_shared());
    if (thread() == 0) expect_arrivals(inbox.arrivals, kThreads * sizeof *words);
    if (thread() == 1) expect_arrivals(inbox.others, kThreads * sizeof *words);
    cluster_arrive();
    wait_for_launch_before();
    const float in = args.in[thread()];
    cluster_wait();
    send(words + thread(), other_rank(), Bf16x4{{1, 2}}, inbox.arrivals);
    wait_arrivals(inbox.arrivals);
    const std::uint32_t sum = words[thread() ^ 64u].word[1];
    send(words + kThreads + thread(), 1 - other_rank(), Bf16x4{{3, sum}}, inbox.others);
    if (thread() == 0) wait_arrivals(inbox.others);
    barrier();
    args.out[blockIdx.x * kThreads + thread()] = in + static_cast<float>(words[kThreads + thread()].word[1]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Wrong

void lane_left_kernel(Args args) {
    if (thread() == 7) return;
    args.out[thread()] = shuffle_xor(args.in[thread()], 1);
}

void narrow_mask_kernel(Args args) {
    const std::uint32_t value = sim::shuffle(sim::Shuffle::Xor, 0xffffffffu, thread(), 1, 32);
    args.out[thread()] = static_cast<float>(value);
}

void unnamed_source_kernel(Args args) {
    if ((thread() & 1u) == 0) {
        args.out[thread()] = static_cast<float>(
            sim::shuffle(sim::Shuffle::Xor,
                         0x5555555555555555u >> (sim::wave_lane() < 32 ? 32 : 0) << (sim::wave_lane() < 32 ? 0 : 32),
                         thread(), 1, 32));
    }
}

void diverged_shuffle_kernel(Args args) {
    args.out[thread()] = thread() % 32 < 16 ? shuffle_xor(1.0f, 1) : shuffle_xor(2.0f, 2);
}

void late_lane_kernel(Args args) {
    if (thread() == 5) barrier();
    args.out[thread()] = shuffle_xor(args.in[thread()], 1);
    if (thread() != 5) barrier();
}

void skipped_barrier_kernel(Args args) {
    args.out[thread()] = 0.0f;
    if (thread() == 9) return;
    barrier();
}

void two_barriers_kernel(Args args) {
    args.out[thread()] = 0.0f;
    if (thread() < 64) {
        barrier();
    } else {
        barrier();
    }
}

void left_wave_barrier_kernel(Args args) {
    args.out[thread()] = 0.0f;
    if (thread() == 9) return;
    wave_barrier();
}

void shared_past_end_kernel(Args args) {
    auto& shared = block_shared<Words>();
    shared.word[thread() + 1] = args.in[thread()];
}

void dynamic_past_end_kernel(Args args) { dynamic_shared()[thread() == 3 ? 2 * kThreads : thread()].x = args.in[0]; }

void global_past_end_kernel(Args args) { args.out[thread()] = args.in[thread() * 9]; }

void wild_write_kernel(Args args) { args.out[thread() == 77 ? 1u << 20 : thread()] = args.in[0]; }

void write_input_kernel(Args args) { const_cast<float*>(args.in)[thread()] = 1.0f; }

void misaligned_global_kernel(Args args) {
    const auto* odd = reinterpret_cast<const Float4*>(args.in + 1);
    args.out[thread()] = odd[thread()].y;
}

void misaligned_word_kernel(Args args) {
    const auto* bytes = reinterpret_cast<const char*>(args.in);
    args.out[thread()] = *reinterpret_cast<const float*>(bytes + thread());
}

void misaligned_shared_kernel(Args args) {
    auto* words = reinterpret_cast<float*>(dynamic_shared());
    store_float4(reinterpret_cast<Float4*>(words + 2 * thread()), {args.in[0], 0.0f, 0.0f, 0.0f});
}

void unwritten_shared_kernel(Args args) {
    auto& shared = block_shared<Words>();
    if (thread() != 100) shared.word[thread()] = 1.0f;
    barrier();
    args.out[thread()] = shared.word[thread()];
}

void unwritten_global_kernel(Args args) { args.out[thread()] = args.out[thread() + kThreads]; }

void write_read_race_kernel(Args args) {
    auto& shared = block_shared<Words>();
    shared.word[thread()] = args.in[thread()];
    args.out[thread()] = shared.word[thread() ^ 32u];
}

void read_write_race_kernel(Args args) {
    auto& shared = block_shared<Words>();
    shared.word[thread()] = args.in[thread()];
    barrier();
    const float value = shared.word[thread() ^ 64u];
    shared.word[thread()] = value;
}

void write_write_race_kernel(Args args) {
    auto& shared = block_shared<Words>();
    shared.word[thread() / 2] = args.in[thread()];
}

void wave_barrier_too_weak_kernel(Args args) {
    auto& shared = block_shared<Words>();
    shared.word[thread()] = args.in[thread()];
    wave_barrier();
    args.out[thread()] = shared.word[thread() ^ 64u];
}

void global_race_kernel(Args args) {
    args.out[thread()] = args.in[thread()];
    local_barrier();  // which orders no global memory
    args.out[kThreads + thread()] = args.out[thread() ^ 64u];
}

void unwaited_copy_kernel(Args args) {
    Float4* tile = dynamic_shared();
    copy_async(tile + thread(), reinterpret_cast<const Float4*>(args.in) + thread());
    copy_async_commit();
    barrier();
    args.out[thread()] = tile[thread()].x;
}

void uncommitted_copy_kernel(Args args) {
    Float4* tile = dynamic_shared();
    copy_async(tile + thread(), reinterpret_cast<const Float4*>(args.in) + thread());
    copy_async_wait<0>();
    barrier();
    args.out[thread()] = tile[thread()].x;
}

void overwriting_copy_kernel(Args args) {
    Float4* tile = dynamic_shared();
    tile[thread()] = {1.0f, 2.0f, 3.0f, 4.0f};
    barrier();
    args.out[thread()] = tile[thread() ^ 64u].x;
    copy_async(tile + thread(), reinterpret_cast<const Float4*>(args.in) + thread());
    copy_async_commit();
    copy_async_wait<0>();
}

template <bool kFenceBefore, bool kBarrier, bool kFenceAfter, bool kAtomic>
void cross_block_kernel(Args args) {
    auto& shared = block_shared<Words>();
    args.out[blockIdx.x * kThreads + thread()] = args.in[thread()];
    if (kFenceBefore) fence();
    if (kBarrier) barrier();
    if (thread() == 0) {
        const unsigned count = kAtomic ? atomic_count(args.counter, 1) : (args.counter[0] += 1) - 1;
        shared.word[0] = count == 1 ? 1.0f : 0.0f;
    }
    barrier();
    if (shared.word[0] == 0.0f) return;
    if (kFenceAfter) fence();
    args.out[512 + thread()] = load_from_other_block(args.out + (1 - blockIdx.x) * kThreads + thread());
}

void two_writers_kernel(Args args) { args.out[thread()] = args.in[blockIdx.x]; }

void endless_wait_kernel(Args args) {
    while (load_from_other_block(args.in) != 12345.0f) {
    }
    args.out[0] = 1.0f;
}

// What the others do meanwhile they have most likely done when it returns.
__forceinline__ void dawdle(Args args) {
    for (int i = 0; i < 200; ++i) load_from_other_block(args.in);
}

// All has been sent when it returns.
__forceinline__ Inbox& filled_inbox() {
    Inbox& inbox = open_inbox(sizeof inbox.value);
    send(&inbox.value[thread()], other_rank(), 1.0f, inbox.arrivals);
    cluster_arrive();
    cluster_wait();
    return inbox;
}

void unwaited_send_kernel(Args args) {
    Inbox& inbox = filled_inbox();
    args.out[blockIdx.x * kThreads + thread()] = inbox.value[thread()];
    wait_arrivals(inbox.arrivals);
}

void overwritten_send_kernel(Args) {
    Inbox& inbox = filled_inbox();
    inbox.value[thread()] = 2.0f;
    wait_arrivals(inbox.arrivals);
}

template <bool kBarrier>
void one_waits_kernel(Args args) {
    Inbox& inbox = filled_inbox();
    if (thread() == 0) wait_arrivals(inbox.arrivals);
    if (kBarrier) barrier();
    args.out[blockIdx.x * kThreads + thread()] = inbox.value[thread()];
}

void unwaited_bulk_kernel(Args args) {
    Inbox& inbox = open_inbox(16);
    if (thread() == 0) copy_bulk(inbox.tile, args.in, 16, inbox.arrivals);
    barrier();
    args.out[blockIdx.x * kThreads + thread()] = inbox.tile[thread() / kThreads].x;
    wait_arrivals(inbox.arrivals);
}

void overwriting_bulk_kernel(Args args) {
    Inbox& inbox = open_inbox(sizeof inbox.tile);
    inbox.tile[thread()].x = 1.0f;
    if (thread() == 0) dawdle(args);
    if (thread() == 0) copy_bulk(inbox.tile, args.in, sizeof inbox.tile, inbox.arrivals);
    wait_arrivals(inbox.arrivals);
}

template <bool kCopies>
void unordered_expect_kernel(Args args) {
    auto& inbox = block_shared<Inbox>();
    wait_for_launch_before();
    if (thread() == 0) expect_arrivals(inbox.arrivals, kCopies ? 16 : 0);
    dawdle(args);
    if (kCopies && thread() == 99) copy_bulk(inbox.tile, args.in, 16, inbox.arrivals);
    if (kCopies) barrier();
    wait_arrivals(inbox.arrivals);
}

void early_send_kernel(Args) {
    auto& inbox = block_shared<Inbox>();
    if (thread() == 0) expect_arrivals(inbox.arrivals, sizeof inbox.value);
    cluster_arrive();
    send(&inbox.value[thread()], other_rank(), 1.0f, inbox.arrivals);
    cluster_wait();
    wait_arrivals(inbox.arrivals);
}

void late_expect_kernel(Args args) {
    auto& inbox = block_shared<Inbox>();
    wait_for_launch_before();
    cluster_arrive();
    if (thread() == 0) expect_arrivals(inbox.arrivals, sizeof inbox.value);
    cluster_wait();
    dawdle(args);
    send(&inbox.value[thread()], other_rank(), 1.0f, inbox.arrivals);
    barrier();
    wait_arrivals(inbox.arrivals);
}

void send_to_finished_kernel(Args args) {
    auto& inbox = block_shared<Inbox>();
    wait_for_launch_before();
    cluster_arrive();
    cluster_wait();
    if (blockIdx.x == 1) return;
    dawdle(args);
    if (thread() == 0) send(&inbox.value[0], 1, 1.0f, inbox.arrivals);
}

void finish_unwaited_kernel(Args) {
    Inbox& inbox = open_inbox(sizeof inbox.value);
    send(&inbox.value[thread()], other_rank(), 1.0f, inbox.arrivals);
    if (blockIdx.x == 0) wait_arrivals(inbox.arrivals);
}

void finish_expecting_kernel(Args) { open_inbox(8); }

template <int kRank>
void wrong_rank_kernel(Args) {
    Inbox& inbox = open_inbox(4);
    if (thread() == 3) send(&inbox.value[0], kRank, 1.0f, inbox.arrivals);
    wait_arrivals(inbox.arrivals);
}

void unexpected_send_kernel(Args) {
    Inbox& inbox = open_inbox(0);
    if (thread() == 3) send(&inbox.value[0], other_rank(), 1.0f, inbox.others);
    barrier();
    wait_arrivals(inbox.arrivals);
}

void unexpected_wait_kernel(Args) {
    Inbox& inbox = open_inbox(0);
    wait_arrivals(inbox.others);
}

void expected_twice_kernel(Args) {
    auto& inbox = block_shared<Inbox>();
    if (thread() % 64 == 0) expect_arrivals(inbox.arrivals, 4);
}

void too_many_bytes_kernel(Args) {
    Inbox& inbox = open_inbox(sizeof inbox.value - 4);
    send(&inbox.value[thread()], other_rank(), 1.0f, inbox.arrivals);
    wait_arrivals(inbox.arrivals);
}

void missing_bytes_kernel(Args) {
    Inbox& inbox = open_inbox(sizeof inbox.value);
    if (thread() != 7) send(&inbox.value[thread()], other_rank(), 1.0f, inbox.arrivals);
    if (thread() == 50) wait_arrivals(inbox.arrivals);
    barrier();
}

void missing_bytes_spin_kernel(Args args) {
    Inbox& inbox = open_inbox(4);
    if (thread() == 0) wait_arrivals(inbox.arrivals);
    while (load_from_other_block(args.in) == 1.0f) {
    }
}

void left_cluster_barrier_kernel(Args) {
    if (blockIdx.x == 1 && thread() == 9) return;
    cluster_arrive();
    cluster_wait();
}

void cluster_barrier_and_barrier_kernel(Args) {
    if (blockIdx.x == 1 && thread() == 9) barrier();
    cluster_arrive();
    cluster_wait();
    if (blockIdx.x == 1 && thread() != 9) barrier();
}

void wait_without_arrive_kernel(Args) { cluster_wait(); }

void arrive_twice_kernel(Args) {
    cluster_arrive();
    cluster_arrive();
    cluster_wait();
}

void arrive_and_leave_kernel(Args) { cluster_arrive(); }

// Aside by so many bytes at either side.
template <int kShared, int kGlobal, unsigned kBytes>
void aside_bulk_kernel(Args args) {
    Inbox& inbox = open_inbox(kBytes);
    auto* to = reinterpret_cast<char*>(inbox.tile) + kShared;
    const auto* from = reinterpret_cast<const char*>(args.in) + kGlobal;
    if (thread() == 0) copy_bulk(to, from, kBytes, inbox.arrivals);
    wait_arrivals(inbox.arrivals);
}

void bulk_before_wait_kernel(Args args) {
    auto& inbox = block_shared<Inbox>();
    if (thread() == 0) {
        expect_arrivals(inbox.arrivals, 16);
        copy_bulk(inbox.tile, args.in, 16, inbox.arrivals);
        wait_arrivals(inbox.arrivals);
    }
}

void misaligned_send_kernel(Args) {
    Inbox& inbox = open_inbox(16);
    auto* place = reinterpret_cast<char*>(inbox.value) + 8;
    if (thread() == 0) sim::send(place, other_rank(), inbox.tile, 16, inbox.arrivals);
    wait_arrivals(inbox.arrivals);
}

void send_past_end_kernel(Args) {
    Inbox& inbox = open_inbox(sizeof(Float4));
    if (thread() == 0) send(inbox.tile + kThreads, other_rank(), Float4{}, inbox.arrivals);
    wait_arrivals(inbox.arrivals);
}

void private_arrivals_kernel(Args) {
    Arrivals arrivals{};
    expect_arrivals(arrivals, 4);
}

template <bool kReads>
void send_to_used_kernel(Args args) {
    auto& inbox = block_shared<Inbox>();
    wait_for_launch_before();
    if (thread() == 0) expect_arrivals(inbox.arrivals, sizeof inbox.value);
    if (kReads) inbox.tile[thread()].x = 1.0f;
    cluster_arrive();
    if (kReads) {
        args.out[blockIdx.x * kThreads + thread()] = inbox.tile[thread()].x;
    } else {
        inbox.tile[thread()].x = 1.0f;
    }
    cluster_wait();
    send(&inbox.tile[thread()].x, other_rank(), 1.0f, inbox.arrivals);
    wait_arrivals(inbox.arrivals);
}

// Several readers of a word, some of them after their own cluster_arrive().
void send_to_read_by_many_kernel(Args args) {
    auto& inbox = block_shared<Inbox>();
    wait_for_launch_before();
    if (thread() == 0) expect_arrivals(inbox.arrivals, sizeof inbox.value);
    inbox.value[thread()] = 1.0f;
    barrier();
    cluster_arrive();
    args.out[blockIdx.x * kThreads + thread()] = inbox.value[thread() / 2];
    cluster_wait();
    send(&inbox.value[thread()], other_rank(), 1.0f, inbox.arrivals);
    wait_arrivals(inbox.arrivals);
}

void send_over_send_kernel(Args) {
    Inbox& inbox = open_inbox(sizeof inbox.value);
    send(&inbox.value[thread() / 2], other_rank(), 1.0f, inbox.arrivals);
    wait_arrivals(inbox.arrivals);
}

void touched_arrivals_kernel(Args args) {
    Inbox& inbox = open_inbox(0);
    if (thread() == 0) args.out[blockIdx.x] = static_cast<float>(inbox.arrivals.state);
}

void unseen_kernel(Args) {}

void much_shared_kernel(Args args) {
    struct Much {
        float word[40 * 1024];
    };
    block_shared<Much>().word[thread()] = args.in[thread()];
}

// ---------------------------------------------------------------------------------------------------------------------

struct alignas(256) Memory {
    float out[1024];
    float between[1024];
    float in[1024];
    float after[1024];
    unsigned counter[1];
};
Memory memory;

struct Outcome {
    int code;
    std::string text;
};

Outcome run(const char* card, void (*kernel)(Args), unsigned blocks, std::uint64_t seed, int cluster = 1) {
    std::string problem;
    const int device = sim::open_card(card, seed, &problem);
    CHECK(device >= 0, problem);
    sim::set_device(device);
    sim::take_error();
    memory.counter[0] = 0;
    sim::declare(device, "in", memory.in, sizeof memory.in, false, true);
    sim::declare(device, "out", memory.out, sizeof memory.out, true, false);
    sim::declare(device, "counter", memory.counter, sizeof memory.counter, true, true);
    const Args args{memory.out, memory.in, memory.counter};
    constexpr std::size_t kShared = 2 * kThreads * sizeof(Float4);
    int code = cluster == 1 ? launch(kernel, dim3(blocks), kThreads, kShared, Stream{}, args)
                            : launch_clusters(kernel, dim3(blocks), kThreads, kShared, Stream{}, args, cluster);
    if (code == 0) code = stream_synchronize(nullptr);
    const Outcome outcome{code, code == 0 ? "" : error_text(code)};
    sim::withdraw(device);
    return outcome;
}

// Two launches, the second of which may overlap the first, and that whatever ran before.
Outcome run_behind(void (*first)(Args), void (*second)(Args), std::uint64_t seed) {
    std::string problem;
    const int device = sim::open_card("sm_90", seed, &problem);
    sim::set_device(device);
    sim::take_error();
    sim::declare(device, "in", memory.in, sizeof memory.in, false, true);
    sim::declare(device, "out", memory.out, sizeof memory.out, true, false);
    const Args args{memory.out, memory.in, memory.counter};
    int code = launch(wait_then_let_kernel, dim3(2), kThreads, 0, Stream{}, args);  // whatever ran before
    if (code == 0) code = launch_overlapping(first, dim3(2), kThreads, 0, Stream{}, args);
    if (code == 0) code = launch_overlapping(second, dim3(2), kThreads, 0, Stream{}, args);
    if (code == 0) code = stream_synchronize(nullptr);
    const Outcome outcome{code, code == 0 ? "" : error_text(code)};
    sim::withdraw(device);
    return outcome;
}

void check_overlapping() {
    const struct {
        const char* what;
        void (*first)(Args);
        void (*second)(Args);
        const char* says;  // null: all is right
    } rows[] = {
        {"overlapping launches", wait_then_let_kernel, read_ahead_kernel, nullptr},
        {"a read of what the launch ahead writes", wait_then_let_kernel, read_output_ahead_kernel,
         "reads 'out' before it has waited for the launch ahead, and one that may still run writes it"},
        {"a write before the wait", wait_then_let_kernel, write_ahead_kernel,
         "writes 'out' before it has waited for the launch ahead"},
        {"a read behind a launch that let too early", let_then_wait_kernel, read_ahead_kernel,
         "before it has waited for the launch ahead, beside which anything may run"},
        {"a read before any wait", read_ahead_kernel, wait_then_let_kernel,
         "before it has waited for the launch ahead, beside which anything may run"},
    };
    for (const auto& row : rows) {
        for (std::uint64_t seed = 0; seed < 4; ++seed) {
            const Outcome got = run_behind(row.first, row.second, seed);
            CHECK((got.code == 0) == (row.says == nullptr), row.what, seed, got.text);
            CHECK(row.says == nullptr || got.text.find(row.says) != std::string::npos, row.what, got.text);
            if (seed == 0 && row.says != nullptr) {
                std::cout << std::left << std::setw(44) << row.what << got.text << '\n';
            }
        }
    }
}

struct Case {
    const char* what;
    const char* name;  // of the kernel, as the error gives it
    void (*kernel)(Args);
    const char* card;
    unsigned blocks;
    int code;
    const char* says;
    int cluster = 1;
};

const Case kCases[] = {
    {"a shuffle with a lane that has left", "lane_left_kernel", lane_left_kernel, "gfx1201", 1, 719,
     "shuffles with lane 7"},
    {"the same on 64 lanes", "lane_left_kernel", lane_left_kernel, "gfx942", 1, 719, "shuffles with lane 7"},
    {"a 32-bit mask on a 64-lane wave", "narrow_mask_kernel", narrow_mask_kernel, "gfx942", 1, 719,
     "its own shuffle mask 0xffffffff does not name"},
    {"a shuffle from a lane outside its mask", "unnamed_source_kernel", unnamed_source_kernel, "gfx942", 1, 719,
     "does not name"},
    {"lanes of one mask at different shuffles", "diverged_shuffle_kernel", diverged_shuffle_kernel, "sm_90", 1, 719,
     "at another shuffle"},
    {"a lane that waits at a barrier meanwhile", "late_lane_kernel", late_lane_kernel, "gfx1100", 1, 719,
     "lanes of its mask do not reach: thread 5 waits at the barrier"},
    {"a barrier that one thread has left", "skipped_barrier_kernel", skipped_barrier_kernel, "gfx1201", 1, 719,
     "part of the block does not reach: thread 9 has left"},
    {"two barriers, each reached by half", "two_barriers_kernel", two_barriers_kernel, "sm_75", 1, 719,
     "part of the block does not reach"},
    {"a wave barrier that a lane has left", "left_wave_barrier_kernel", left_wave_barrier_kernel, "gfx942", 1, 719,
     "a lane of its wave has left"},
    {"static shared memory past its end", "shared_past_end_kernel", shared_past_end_kernel, "gfx1201", 1, 700,
     "past the end: byte 512 of a static piece"},
    {"dynamic shared memory past its end", "dynamic_past_end_kernel", dynamic_past_end_kernel, "sm_90", 1, 700,
     "past the end: byte 4096 of its dynamic shared memory (4096 bytes)"},
    {"a global read past the end", "global_past_end_kernel", global_past_end_kernel, "sm_120", 1, 700,
     "past the end of 'in' (4096 bytes)"},
    {"a global write elsewhere", "wild_write_kernel", wild_write_kernel, "gfx90a", 1, 700,
     "outside of the buffers of the launch"},
    {"a write to a read-only buffer", "write_input_kernel", write_input_kernel, "gfx1201", 1, 700,
     "'in', which is read-only"},
    {"a misaligned float4 in global memory", "misaligned_global_kernel", misaligned_global_kernel, "sm_90", 1, 716,
     "not aligned"},
    {"a misaligned word", "misaligned_word_kernel", misaligned_word_kernel, "gfx942", 1, 700, "not aligned"},
    {"a misaligned float4 in shared memory", "misaligned_shared_kernel", misaligned_shared_kernel, "sm_90", 1, 716,
     "not aligned"},
    {"shared memory that nobody has written", "unwritten_shared_kernel", unwritten_shared_kernel, "gfx1201", 1, 719,
     "byte 400 of a static piece of shared memory (512 bytes), which nobody has written"},
    {"global memory that nobody has written", "unwritten_global_kernel", unwritten_global_kernel, "gfx1201", 1, 719,
     "of 'out', which nobody has written"},
    {"a shared word written, then read", "write_read_race_kernel", write_read_race_kernel, "gfx1201", 1, 719, ""},
    {"a shared word read, then written", "read_write_race_kernel", read_write_race_kernel, "gfx942", 1, 719,
     "with no barrier between"},
    {"a shared word written twice", "write_write_race_kernel", write_write_race_kernel, "sm_90", 1, 719,
     "wrote, with no barrier between"},
    {"a wave barrier between waves", "wave_barrier_too_weak_kernel", wave_barrier_too_weak_kernel, "sm_90", 1, 719, ""},
    {"a local barrier for global memory", "global_race_kernel", global_race_kernel, "gfx1201", 1, 719, "(no barrier)"},
    {"a copy that is not waited for", "unwaited_copy_kernel", unwaited_copy_kernel, "sm_90", 1, 719,
     "which a copy in the background"},
    {"a copy that is not committed", "uncommitted_copy_kernel", uncommitted_copy_kernel, "sm_90", 1, 719,
     "which a copy in the background"},
    {"a copy into words being read", "overwriting_copy_kernel", overwriting_copy_kernel, "sm_90", 1, 719,
     "with no barrier between"},
    {"the same where copies are plain", "overwriting_copy_kernel", overwriting_copy_kernel, "gfx1201", 1, 719,
     "with no barrier between"},
    {"another block's word, no fence before", "cross_block_kernel<false, true, true, true>",
     cross_block_kernel<false, true, true, true>, "gfx1201", 2, 719, "(fence, atomic operation, fence)"},
    {"another block's word, no barrier", "cross_block_kernel<true, false, true, true>",
     cross_block_kernel<true, false, true, true>, "gfx942", 2, 719, "(fence, atomic operation, fence)"},
    {"another block's word, no fence after", "cross_block_kernel<true, true, false, true>",
     cross_block_kernel<true, true, false, true>, "sm_90", 2, 719, "(fence, atomic operation, fence)"},
    {"another block's word, a plain counter", "cross_block_kernel<true, true, true, false>",
     cross_block_kernel<true, true, true, false>, "gfx1201", 2, 719, "of 'counter'"},
    {"one word, two blocks that write", "two_writers_kernel", two_writers_kernel, "gfx1201", 2, 719,
     "(fence, atomic operation, fence)"},
    {"a wait for what never comes", "endless_wait_kernel", endless_wait_kernel, "gfx1201", 1, 702, "for ever"},
    {"what is sent, read without a wait", "unwaited_send_kernel", unwaited_send_kernel, "sm_90", 2, 719,
     "which may be on its way: it has not waited", 2},
    {"what is sent, written without a wait", "overwritten_send_kernel", overwritten_send_kernel, "sm_120", 2, 719,
     "which may be on its way: it has not waited", 2},
    {"a wait of another thread, no barrier", "one_waits_kernel<false>", one_waits_kernel<false>, "sm_90", 2, 719,
     "which may be on its way: it has not waited", 2},
    {"a bulk copy, read without a wait", "unwaited_bulk_kernel", unwaited_bulk_kernel, "sm_90", 2, 719,
     "which may be on its way: it has not waited for the arrivals", 2},
    {"a bulk copy into words in use", "overwriting_bulk_kernel", overwriting_bulk_kernel, "sm_90", 2, 719,
     "wrote, with no barrier between", 2},
    {"a bulk copy, no barrier after the expecting", "unordered_expect_kernel<true>", unordered_expect_kernel<true>,
     "sm_90", 1, 719, "copies for arrivals that thread 0 has expected, with no barrier between"},
    {"a wait, no barrier after the expecting", "unordered_expect_kernel<false>", unordered_expect_kernel<false>,
     "sm_90", 1, 719, "waits for arrivals that thread 0 has expected, with no barrier between"},
    {"sending before cluster_wait()", "early_send_kernel", early_send_kernel, "sm_90", 2, 719,
     "sends before cluster_wait()", 2},
    {"expecting after cluster_arrive()", "late_expect_kernel", late_expect_kernel, "sm_90", 2, 719,
     "where these arrivals were expected after cluster_arrive()", 2},
    {"sending to a block that has finished", "send_to_finished_kernel", send_to_finished_kernel, "sm_90", 2, 719,
     "sends to block (1,0,0), which has finished", 2},
    {"a block that leaves before the wait", "finish_unwaited_kernel", finish_unwaited_kernel, "sm_90", 2, 719,
     "of 512 bytes are on their way or still to be sent", 2},
    {"a block that leaves and expects", "finish_expecting_kernel", finish_expecting_kernel, "sm_90", 2, 719,
     "8 of 8 bytes are on their way or still to be sent", 2},
    {"sending past the cluster", "wrong_rank_kernel<2>", wrong_rank_kernel<2>, "sm_90", 4, 719,
     "sends to block 2 of its cluster, which has 2", 2},
    {"sending to a negative rank", "wrong_rank_kernel<-1>", wrong_rank_kernel<-1>, "sm_90", 2, 719,
     "sends to block -1 of its cluster", 2},
    {"arrivals that nobody expects, sent to", "unexpected_send_kernel", unexpected_send_kernel, "sm_90", 2, 719,
     "where nobody has expected these arrivals", 2},
    {"arrivals that nobody expects, waited for", "unexpected_wait_kernel", unexpected_wait_kernel, "sm_90", 2, 719,
     "waits for arrivals that nobody has expected", 2},
    {"arrivals that are expected twice", "expected_twice_kernel", expected_twice_kernel, "sm_90", 2, 719,
     "has expected before: once a launch", 2},
    {"more bytes than are expected", "too_many_bytes_kernel", too_many_bytes_kernel, "sm_90", 2, 719,
     " 4 bytes, where 0 of 508 expected ones are still to come", 2},
    {"fewer bytes than are expected", "missing_bytes_kernel", missing_bytes_kernel, "sm_90", 2, 702,
     "waits for ever for arrivals: 4 of 512 bytes are missing", 2},
    {"the same beside threads that spin", "missing_bytes_spin_kernel", missing_bytes_spin_kernel, "sm_90", 2, 702,
     "waits for ever for arrivals: 4 of 4 bytes are missing", 2},
    {"a cluster's barrier that a thread has left", "left_cluster_barrier_kernel", left_cluster_barrier_kernel, "sm_90",
     2, 719, "does not reach: of block (1,0,0) thread 9 has left the kernel", 2},
    {"and that one reaches another instead of", "cluster_barrier_and_barrier_kernel",
     cluster_barrier_and_barrier_kernel, "sm_90", 2, 719, "does not reach: of block (1,0,0) thread 9 waits at", 2},
    {"cluster_wait() without cluster_arrive()", "wait_without_arrive_kernel", wait_without_arrive_kernel, "sm_90", 2,
     719, "without cluster_arrive()", 2},
    {"cluster_arrive() twice", "arrive_twice_kernel", arrive_twice_kernel, "sm_90", 2, 719,
     "again without cluster_wait()", 2},
    {"cluster_arrive() without cluster_wait()", "arrive_and_leave_kernel", arrive_and_leave_kernel, "sm_90", 2, 719,
     "leaves the kernel without cluster_wait()", 2},
    {"a bulk copy to a misaligned address", "aside_bulk_kernel<8, 0, 16u>", aside_bulk_kernel<8, 0, 16>, "sm_90", 2,
     716, "not aligned", 2},
    {"a bulk copy from a misaligned address", "aside_bulk_kernel<0, 4, 16u>", aside_bulk_kernel<0, 4, 16>, "sm_90", 2,
     716, "not aligned", 2},
    {"a bulk copy of eight bytes", "aside_bulk_kernel<0, 0, 8u>", aside_bulk_kernel<0, 0, 8>, "sm_90", 2, 716,
     "copies 8 bytes, no multiple of 16", 2},
    {"a bulk copy past the shared memory", "aside_bulk_kernel<2032, 0, 32u>", aside_bulk_kernel<2032, 0, 32>, "sm_90",
     2, 700, "copies outside of its block's shared memory", 2},
    {"a bulk copy past the end of a buffer", "aside_bulk_kernel<0, 4080, 32u>", aside_bulk_kernel<0, 4080, 32>, "sm_90",
     2, 700, "reads past the end of 'in'", 2},
    {"a bulk copy over arrivals", "aside_bulk_kernel<-528, 0, 16u>", aside_bulk_kernel<-528, 0, 16>, "sm_90", 2, 719,
     ", over arrivals", 2},
    {"a bulk copy before the wait for the launch", "bulk_before_wait_kernel", bulk_before_wait_kernel, "sm_90", 2, 719,
     "reads 'in' before it has waited for the launch ahead", 2},
    {"sending to a misaligned address", "misaligned_send_kernel", misaligned_send_kernel, "sm_90", 2, 716,
     "a 16-byte access is not aligned", 2},
    {"sending past the shared memory", "send_past_end_kernel", send_past_end_kernel, "sm_90", 2, 700,
     "sends outside of its block's shared memory", 2},
    {"arrivals that are not in shared memory", "private_arrivals_kernel", private_arrivals_kernel, "sm_90", 2, 700,
     "has arrivals outside of its block's shared memory", 2},
    {"sending to words that are written", "send_to_used_kernel<false>", send_to_used_kernel<false>, "sm_90", 2, 719,
     "wrote, and no barrier orders", 2},
    {"sending to words that are read", "send_to_used_kernel<true>", send_to_used_kernel<true>, "sm_90", 2, 719,
     "read, and no barrier orders", 2},
    {"sending to words that many read", "send_to_read_by_many_kernel", send_to_read_by_many_kernel, "sm_90", 2, 719,
     "and no barrier orders", 2},
    {"sending to a word twice", "send_over_send_kernel", send_over_send_kernel, "sm_90", 2, 719,
     "which may be on its way already", 2},
    {"arrivals that a thread reads itself", "touched_arrivals_kernel", touched_arrivals_kernel, "sm_90", 2, 719,
     "which holds arrivals", 2},
    {"arrivals on a card without clusters", "expected_twice_kernel", expected_twice_kernel, "gfx1201", 1, 719,
     "a card without clusters does not have"},
    {"a cluster's barrier there", "left_cluster_barrier_kernel", left_cluster_barrier_kernel, "sm_75", 1, 719,
     "on a card without clusters"},
    {"a kernel without instrumentation", "unseen_kernel", unseen_kernel, "gfx1201", 1, 719, "saw no access"},
    {"more shared memory than there is", "much_shared_kernel", much_shared_kernel, "gfx1201", 1, 701,
     "more than the card's 65536"},
};

void check_cases() {
    for (const Case& c : kCases) {
        for (std::uint64_t seed = 0; seed < 4; ++seed) {
            const Outcome got = run(c.card, c.kernel, c.blocks, seed, c.cluster);
            CHECK(got.code == c.code, c.what, c.card, seed, got.code, got.text);
            CHECK(got.text.compare(0, std::strlen(c.name), c.name) == 0, c.what, got.text);
            CHECK(got.text.find(c.says) != std::string::npos, c.what, got.text);
            if (std::strcmp(c.name, "unseen_kernel") != 0) {
                CHECK(got.text.find(", block (") != std::string::npos, got.text);
                CHECK(got.text.find(", thread ") != std::string::npos, got.text);
                // Of a call that is inlined whole, clang tells only where it was inlined from.
                CHECK(got.text.find(", tests/cpp/sim_detectors.cpp:") != std::string::npos ||
                          got.text.find(", csrc/gpu/vendor/sim.hpp:") != std::string::npos,
                      got.text);
            }
            if (seed == 0) std::cout << std::left << std::setw(44) << c.what << got.text << '\n';
        }
    }
    for (const char* card : {"gfx1200", "gfx1201", "gfx1100", "gfx942", "gfx90a", "sm_75", "sm_90", "sm_120"}) {
        for (std::uint64_t seed = 0; seed < 4; ++seed) {
            const Outcome all_right = run(card, all_right_kernel, 2, seed);
            CHECK(all_right.code == 0, card, seed, all_right.text);
            const Outcome copy_right = run(card, copy_right_kernel, 1, seed);
            CHECK(copy_right.code == 0, card, seed, copy_right.text);
            const Outcome polite_wait = run(card, polite_wait_kernel, 2, seed);
            CHECK(polite_wait.code == 0, card, seed, polite_wait.text);
            const Outcome protocol = run(card, cross_block_kernel<true, true, true, true>, 2, seed);
            CHECK(protocol.code == 0, card, seed, protocol.text);
        }
    }
    for (const char* card : {"sm_90", "sm_120"}) {
        for (std::uint64_t seed = 0; seed < 8; ++seed) {
            for (const auto kernel :
                 {send_right_kernel, copy_bulk_right_kernel, send_both_right_kernel, one_waits_kernel<true>}) {
                const Outcome right = run(card, kernel, 4, seed, 2);
                CHECK(right.code == 0, card, seed, right.text);
                const float wanted = kernel == send_both_right_kernel ? 3.0f : 1.0f;
                for (unsigned i = 0; i < 4 * kThreads; ++i) CHECK(memory.out[i] == wanted, card, seed, memory.out[i]);
            }
            const Outcome alone = run(card, copy_bulk_right_kernel, 3, seed);
            CHECK(alone.code == 0, card, seed, alone.text);
        }
    }
}

}  // namespace
}  // namespace strata::gpu

int main() {
    for (float& value : strata::gpu::memory.in) value = 1.0f;
    strata::gpu::check_overlapping();
    strata::gpu::check_cases();
    return strata::test::result();
}
