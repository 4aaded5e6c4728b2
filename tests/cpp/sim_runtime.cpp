// The host side of the simulated cards: what csrc/gpu and the tests of its error handling rely on.
#include "sim/runtime.hpp"

#include <cstring>
#include <iterator>
#include <string>
#include <thread>

#include "check.hpp"
#include "gpu/vendor.hpp"

namespace strata::gpu {
namespace {

int open(const char* card, std::uint64_t seed = 0) {
    std::string problem;
    const int device = sim::open_card(card, seed, &problem);
    CHECK(device >= 0, problem);
    sim::set_device(device);
    sim::take_error();
    return device;
}

struct Args {
    float* out;
    float value;
};

void write_kernel(Args args) { args.out[threadIdx.x] = args.value; }

void order_kernel(Args args) {
    if (threadIdx.x != 0) return;
    const unsigned turn = atomic_count(reinterpret_cast<unsigned*>(args.out), 1000);
    args.out[1 + turn] = static_cast<float>(static_cast<unsigned>(blockIdx.x));
}

void skip_kernel(Args) {
    if (threadIdx.x != 0) barrier();
}

void check_profiles() {
    struct Row {
        const char* card;
        GrBackend vendor;
        int lanes;
        std::size_t shared_bytes;
        bool background;
        bool clusters;
    };
    const Row rows[] = {
        {"gfx1200", GrBackend::Hip, 32, 64 * 1024, false, false},
        {"gfx1201", GrBackend::Hip, 32, 64 * 1024, false, false},
        {"gfx1100", GrBackend::Hip, 32, 64 * 1024, false, false},
        {"gfx942", GrBackend::Hip, 64, 64 * 1024, false, false},
        {"gfx90a", GrBackend::Hip, 64, 64 * 1024, false, false},
        {"sm_75", GrBackend::Cuda, 32, 64 * 1024, false, false},
        {"sm_90", GrBackend::Cuda, 32, 227 * 1024, true, true},
        {"sm_120", GrBackend::Cuda, 32, 99 * 1024, true, true},
        {"gfx1250,32,327680,16", GrBackend::Hip, 32, 327680, false, false},
        {"sm_89,32,101376,24", GrBackend::Cuda, 32, 101376, true, false},
    };
    for (const Row& row : rows) {
        const int device = open(row.card);
        VendorDevice facts{};
        CHECK(query_device(device, &facts) == 0);
        const std::string name = row.card;
        CHECK(facts.arch == name.substr(0, name.find(',')), facts.arch);
        CHECK(facts.wave_width == row.lanes && facts.shared_bytes == row.shared_bytes, row.card);
        CHECK(facts.clusters == row.clusters, row.card);
        CHECK(facts.compute_units > 0, row.card);
        CHECK(GrBackend{kBackend} == row.vendor, row.card);
        sim::Card card;
        std::string problem;
        CHECK(sim::find_card(row.card, &card, &problem) && card.background_copies == row.background, row.card);
    }
    for (const char* bad : {"", "gfx", "gfx1201 ", "x,32,65536", "x,48,65536,4", "x,32,1024,4", "x,32,65536,0",
                            "x,32,65536,4,5", ",32,65536,4", "x,32k,65536,4", "x,32,999999999999999999999,4"}) {
        std::string problem;
        CHECK(sim::open_card(bad, 0, &problem) < 0 && !problem.empty(), bad);
    }
    int count = 0;
    CHECK(count_devices(&count) == 0 && count == static_cast<int>(std::size(rows)), count);
    const CurrentDevice other(2);
    CHECK(other.error() == 0);
    const CurrentDevice none(1000);
    CHECK(none.error() == 101);
    CHECK(pending_error() == 101 && take_error() == 101 && pending_error() == 0);
}

void check_memory_and_streams() {
    open("sm_90");
    void* memory = nullptr;
    CHECK(device_allocate(&memory, 128 * sizeof(float)) == 0);
    CHECK(sim::live_allocations() == 1);
    Stream stream = nullptr;
    CHECK(stream_create(&stream) == 0);
    CHECK(fill_bytes(memory, 0, 128 * sizeof(float), stream) == 0);
    CHECK(launch(write_kernel, dim3(1), 64, 0, stream, Args{static_cast<float*>(memory), 3.0f}) == 0);
    float host[128];
    std::memset(host, 0x55, sizeof host);
    CHECK(copy_to_host(host, memory, sizeof host, stream) == 0);
    CHECK(host[0] != 3.0f);  // nothing has waited for it
    CHECK(stream_synchronize(stream) == 0);
    CHECK(host[0] == 3.0f && host[63] == 3.0f && host[64] == 0.0f);

    CHECK(launch(write_kernel, dim3(1), 64, 48 * 1024 + 1, stream, Args{}) == 1);  // not asked for
    CHECK(take_error() == 1);
    CHECK(allow_shared(write_kernel, 227 * 1024 + 1) == 1 && take_error() == 1);
    CHECK(allow_shared(write_kernel, 227 * 1024) == 0);
    CHECK(launch(write_kernel, dim3(1), 64, 227 * 1024, stream, Args{static_cast<float*>(memory), 1.0f}) == 0);
    CHECK(launch(write_kernel, dim3(0), 64, 0, stream, Args{}) == 9);
    CHECK(launch(write_kernel, dim3(1), 1025, 0, stream, Args{}) == 9);
    take_error();

    CHECK(device_free(host) == 17 && take_error() == 17);
    CHECK(device_free(memory) == 0 && sim::live_allocations() == 0);
    CHECK(stream_destroy(stream) == 0 && sim::live_streams() == 0);
    CHECK(stream_destroy(stream) == 400 && take_error() == 400);
    sim::Event from = nullptr, to = nullptr;
    float ms = -1.0f;
    CHECK(sim::event_create(&from) == 0 && sim::event_create(&to) == 0);
    CHECK(sim::event_record(from, nullptr) == 0 && sim::event_record(to, nullptr) == 0);
    CHECK(sim::event_synchronize(to) == 0 && sim::event_elapsed_ms(&ms, from, to) == 0 && ms >= 0.0f);
    CHECK(sim::event_destroy(from) == 0 && sim::event_destroy(to) == 0 && sim::live_events() == 0);
}

void check_seeds() {
    std::string orders[4];
    for (int i = 0; i < 4; ++i) {
        open("gfx1201", i < 2 ? 7 : static_cast<std::uint64_t>(i));
        float order[33] = {};
        CHECK(launch(order_kernel, dim3(32), 32, 0, Stream{}, Args{order, 0.0f}) == 0 &&
              stream_synchronize(nullptr) == 0);
        for (int block = 0; block < 32; ++block) orders[i] += std::to_string(order[1 + block]) + " ";
    }
    CHECK(orders[0] == orders[1], orders[0], orders[1]);
    CHECK(orders[0] != orders[2] && orders[2] != orders[3], orders[0]);
}

void check_faults() {
    const int device = open("gfx942");
    CHECK(launch(skip_kernel, dim3(1), 64, 0, Stream{}, Args{}) == 0);  // what a kernel does wrong shows later
    CHECK(stream_synchronize(nullptr) == 719);
    CHECK(std::strcmp(error_name(719), "hipErrorLaunchFailure") == 0, error_name(719));
    CHECK(std::strstr(error_text(719), "skip_kernel, block (0,0,0)") != nullptr, error_text(719));
    CHECK(stream_synchronize(nullptr) == 719);  // for ever
    void* memory = nullptr;
    CHECK(device_allocate(&memory, 16) == 719);
    open("gfx942");
    CHECK(device_allocate(&memory, 16) == 0 && device_free(memory) == 0);  // another card is not concerned
    CHECK(sim::set_device(device) == 0 && device_allocate(&memory, 16) == 719);

    open("sm_90");
    sim::plant(sim::Call::Malloc, 2, 2);
    CHECK(device_allocate(&memory, 16) == 0 && device_free(memory) == 0);
    CHECK(device_allocate(&memory, 16) == 2 && take_error() == 2);
    CHECK(device_allocate(&memory, 16) == 0 && device_free(memory) == 0);
    sim::plant(sim::Call::StreamSync, 1, 700);  // fatal: the card is lost
    CHECK(stream_synchronize(nullptr) == 700 && stream_synchronize(nullptr) == 700);
    CHECK(std::strcmp(error_name(700), "cudaErrorIllegalAddress") == 0);
    open("sm_90");
    sim::plant(sim::Call::StreamSync, 1, 700);
    sim::plant(sim::Call::StreamSync, 0, 0);
    CHECK(stream_synchronize(nullptr) == 0);
    sim::set_pending(2);
    CHECK(pending_error() == 2 && stream_synchronize(nullptr) == 0 && take_error() == 2);
    const long before = sim::calls(sim::Call::Launch);
    CHECK(launch(skip_kernel, dim3(0), 1, 0, Stream{}, Args{}) == 9 && sim::calls(sim::Call::Launch) == before + 1);
    std::thread([] { CHECK(pending_error() == 0); }).join();  // a thread's own
    CHECK(take_error() == 9);
}

void check_capture() {
    open("sm_90");
    Stream stream = nullptr;
    CHECK(stream_create(&stream) == 0);
    bool capturing = true;
    CHECK(stream_is_capturing(stream, &capturing) == 0 && !capturing);
    std::size_t launches = 0;
    float out[32] = {};
    CHECK(sim::begin_capture(stream, sim::CaptureMode::Global) == 0);
    CHECK(stream_is_capturing(stream, &capturing) == 0 && capturing);
    CHECK(launch(write_kernel, dim3(1), 32, 0, stream, Args{out, 1.0f}) == 0);
    CHECK(sim::end_capture(stream, &launches) == 0 && launches == 1 && out[0] == 0.0f);

    void* memory = nullptr;
    CHECK(sim::begin_capture(stream, sim::CaptureMode::Global) == 0);
    std::thread([&] {
        {
            const RelaxedCapture relaxed;
            CHECK(device_allocate(&memory, 16) == 0 && device_free(memory) == 0);
        }
        CHECK(device_allocate(&memory, 16) == 900);  // breaks the capture of the other thread
    }).join();
    CHECK(sim::end_capture(stream, &launches) == 901);
    CHECK(sim::begin_capture(stream, sim::CaptureMode::Global) == 0);
    CHECK(stream_synchronize(stream) == 900);
    CHECK(sim::end_capture(stream, &launches) == 901);
    CHECK(stream_destroy(stream) == 0);
    take_error();
}

// ---------------------------------------------------------------------------------------------------------------------
// Clusters of three blocks. Each copies 63 floats, adds a third of them up, sends the sum to all three blocks and
// writes the sum of what it got.

constexpr int kRanks = 3;
constexpr int kPart = 21;

struct Values {
    Arrivals arrivals;
    alignas(16) float value[64];
};
struct Sums {
    Arrivals arrivals;
    Float4 sum[kRanks];
};

enum class Wrong {
    Nothing,
    ReadsValuesEarly,
    ReadsSumsEarly,
    SendsTooFew,
    SendsTooMany,
    SendsTooFar,
    SendsEarly,
    CopiesAside,
    LeavesEarly,
    LeavesBarrier,
    TakesSumsForCopies,
};

template <Wrong kWrong>
void sums_kernel(Args args) {
    const int rank = static_cast<int>(blockIdx.x % kRanks);
    const int thread = static_cast<int>(static_cast<unsigned>(threadIdx.x));
    if (rank == 1) block_shared<Sums>();  // wherever the first block puts it
    auto& values = block_shared<Values>();
    auto& sums = block_shared<Sums>();
    if (thread == 5) {
        expect_arrivals(values.arrivals, sizeof values.value);
        expect_arrivals(sums.arrivals, sizeof sums.sum);
        copy_bulk(values.value, args.out + (kWrong == Wrong::CopiesAside ? 1 : 0), sizeof values.value,
                  values.arrivals);
    }
    if (kWrong == Wrong::LeavesBarrier && blockIdx.x == 2 && thread == 8) return;
    cluster_arrive();
    if (kWrong == Wrong::SendsEarly) {
        barrier();
    } else {
        cluster_wait();
    }
    if (kWrong != Wrong::ReadsValuesEarly) wait_arrivals(values.arrivals);
    if (thread < kRanks && !(kWrong == Wrong::SendsTooFew && rank == 2)) {
        float sum = 0.0f;
        for (int i = 0; i < kPart; ++i) sum = sum + values.value[rank * kPart + i];
        const int to = thread + (kWrong == Wrong::SendsTooFar ? 1 : 0);
        send(&sums.sum[rank], to, Float4{sum, 0.0f, 0.0f, 0.0f}, sums.arrivals);
        if (kWrong == Wrong::SendsTooMany) send(&sums.sum[rank], to, Float4{}, sums.arrivals);
    }
    if (kWrong == Wrong::LeavesEarly) return;
    if (kWrong == Wrong::TakesSumsForCopies) wait_copies(sums.arrivals);
    if (kWrong != Wrong::ReadsSumsEarly) wait_arrivals(sums.arrivals);
    args.out[64 + blockIdx.x * 64 + threadIdx.x] = sums.sum[0].x + sums.sum[1].x + sums.sum[2].x;
    wait_copies(values.arrivals);
    wait_arrivals(sums.arrivals);
}

struct Outcome {
    int code;
    std::string text;
    bool right;
};

template <Wrong kWrong>
Outcome run_sums(std::uint64_t seed) {
    open("sm_90", seed);
    alignas(16) float memory[64 + 6 * 64] = {};
    for (int i = 0; i < 64; ++i) memory[i] = static_cast<float>(i);
    CHECK(launch_clusters(sums_kernel<kWrong>, dim3(6), 64, 0, Stream{}, Args{memory, 0.0f}, kRanks) == 0);
    Outcome outcome{stream_synchronize(nullptr), "", true};
    if (outcome.code != 0) outcome.text = error_text(outcome.code);
    for (int i = 64; i < 64 + 6 * 64; ++i) outcome.right &= memory[i] == 62.0f * 63.0f / 2.0f;
    take_error();
    return outcome;
}

template <Wrong kWrong>
void check_wrong(int code, const char* says) {
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
        const Outcome got = run_sums<kWrong>(seed);
        CHECK(got.code == code && got.text.find(says) != std::string::npos, seed, got.code, got.text);
        CHECK(got.text.find(", thread ") != std::string::npos, got.text);
    }
}

// As many threads as a cluster can have: each block writes the number of the one behind it.
void ring_kernel(Args args) {
    auto& next = *reinterpret_cast<Values*>(dynamic_shared());
    if (threadIdx.x == 1023) expect_arrivals(next.arrivals, 4);
    cluster_arrive();
    cluster_wait();
    if (threadIdx.x != 1) return;
    const float number = static_cast<float>(static_cast<unsigned>(blockIdx.x));
    send(next.value, (static_cast<int>(blockIdx.x) + 1) % 8, number, next.arrivals);
    wait_arrivals(next.arrivals);
    args.out[blockIdx.x] = next.value[0];
}

// Copies a piece of each round of a row; and each lane asks another one for its number.
struct PieceArgs {
    RowPieces rows;
    float* out;
    int row, piece, aside;
};

void piece_kernel(PieceArgs args) {
    auto& arrivals = block_shared<Arrivals>();
    auto* tile = reinterpret_cast<float*>(dynamic_shared()) + args.aside;
    const int thread = static_cast<int>(static_cast<unsigned>(threadIdx.x));
    if (thread == 0) {
        expect_arrivals(arrivals, 48);
        copy_row_pieces(tile, args.rows, args.row, args.piece, arrivals);
    }
    barrier();
    wait_arrivals(arrivals);
    if (thread < 12) args.out[thread] = tile[thread];
    args.out[12 + thread] = shuffle_from(static_cast<float>(thread), thread * 7 % 32);
}

int run_pieces(int row, int piece, int aside, std::string* text = nullptr) {
    open("sm_90");
    alignas(16) float memory[2 * 3 * 4 * 4];  // rows, rounds, pieces of 16 bytes
    for (int i = 0; i < 96; ++i) memory[i] = static_cast<float>(i);
    float out[12 + 64] = {};
    PieceArgs args{{}, out, row, piece, aside};
    bool can = false;
    CHECK(can_describe_rows(&can) == 0 && can && describe_rows(&args.rows, memory, 2, 3, 4, 16) == 0);
    CHECK(launch_clusters(piece_kernel, dim3(2), 64, 256, Stream{}, args, 2) == 0);
    const int code = stream_synchronize(nullptr);
    if (code != 0 && text != nullptr) *text = error_text(code);
    for (int i = 0; code == 0 && i < 12; ++i) {
        CHECK(out[i] == static_cast<float>(((row * 3 + i / 4) * 4 + piece) * 4 + i % 4), row, piece, i, out[i]);
    }
    for (int i = 0; code == 0 && i < 64; ++i) {
        CHECK(out[12 + i] == static_cast<float>(i / 32 * 32 + i * 7 % 32), i, out[12 + i]);
    }
    take_error();
    return code;
}

void check_pieces() {
    for (int row = 0; row < 2; ++row) {
        for (int piece = 0; piece < 4; ++piece) CHECK(run_pieces(row, piece, 32) == 0, row, piece);
    }
    std::string text;
    CHECK(run_pieces(0, 0, 16, &text) == 716 && text.find("not aligned") != std::string::npos, text);
    CHECK(run_pieces(2, 3, 0, &text) == 719, text);
    CHECK(text.find("copies piece 3 of row 2, of 4 pieces and 2 rows") != std::string::npos, text);
    CHECK(run_pieces(1, 4, 0) == 719 && run_pieces(-1, 0, 0) == 719);
}

void check_clusters() {
    int early_values = 0, early_sums = 0;
    for (std::uint64_t seed = 0; seed < 32; ++seed) {
        const Outcome got = run_sums<Wrong::Nothing>(seed);
        CHECK(got.code == 0 && got.right, seed, got.text);
        early_values += run_sums<Wrong::ReadsValuesEarly>(seed).right ? 0 : 1;
        early_sums += run_sums<Wrong::ReadsSumsEarly>(seed).right ? 0 : 1;
    }
    CHECK(early_values > 24 && early_sums > 24, early_values, early_sums);
    check_wrong<Wrong::SendsTooFew>(702, "waits for ever for arrivals: 16 of 48 bytes are missing");
    check_wrong<Wrong::SendsTooMany>(719, "16 bytes, where 0 of 48 expected ones are still to come");
    check_wrong<Wrong::SendsTooFar>(719, "sends to block 3 of its cluster, which has 3");
    check_wrong<Wrong::SendsEarly>(719, "sends before cluster_wait()");
    check_wrong<Wrong::CopiesAside>(716, "not aligned");
    check_wrong<Wrong::LeavesEarly>(719, "expects arrivals that no thread of its block has waited for");
    check_wrong<Wrong::TakesSumsForCopies>(719, "waits with wait_copies() for bytes that a block has sent");
    check_wrong<Wrong::LeavesBarrier>(719, "part of its cluster does not reach: of block (2,0,0) thread 8 has left");

    for (const char* card : {"gfx1201", "sm_75", "sm_89,32,101376,24"}) {
        open(card);
        CHECK(launch_clusters(write_kernel, dim3(4), 64, 0, Stream{}, Args{}, 2) == 9 && take_error() == 9, card);
        CHECK(launch_clusters(write_kernel, dim3(4), 64, 0, Stream{}, Args{}, 1) == 0, card);
    }
    open("sm_90");
    const auto refused = [](dim3 grid, int cluster) {
        return launch_clusters(write_kernel, grid, 64, 0, Stream{}, Args{}, cluster) == 912 && take_error() == 912;
    };
    CHECK(refused(dim3(4), 3) && refused(dim3(4), 0) && refused(dim3(4), -1) && refused(dim3(16), 16));
    CHECK(refused(dim3(4, 2), 2) && refused(dim3(2), 4));
    CHECK(std::strcmp(error_name(912), "cudaErrorInvalidClusterSize") == 0);
    float out[16] = {};
    CHECK(launch_clusters(ring_kernel, dim3(16), 1024, sizeof(Values), Stream{}, Args{out, 0.0f}, 8) == 0);
    CHECK(stream_synchronize(nullptr) == 0);
    for (int i = 0; i < 16; ++i) CHECK(out[i] == static_cast<float>(i / 8 * 8 + (i + 7) % 8), i, out[i]);
}

}  // namespace
}  // namespace strata::gpu

int main() {
    using namespace strata::gpu;
    check_profiles();
    check_memory_and_streams();
    check_seeds();
    check_faults();
    check_capture();
    check_clusters();
    check_pieces();
    return strata::test::result();
}
