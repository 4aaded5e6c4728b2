// The gate's latch under ThreadSanitizer: 16 threads make the first call on a card at once, reads, checks and
// descriptions. All of csrc/sim and csrc/gpu in this program is instrumented. No kernel runs (ThreadSanitizer does not
// know the executor's fibers): stand_in.hpp's answers take their place.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "gate_scenarios.hpp"
#include "stand_in.hpp"

using namespace strata;
using namespace strata::test;

namespace {

constexpr int kThreads = 16;
constexpr int kRounds = 20;

// A read of one token at a small geometry, in memory of its own.
bool read(int device, Report* report) {
    constexpr Geometry g{32, 1, 8};
    Buffer<float> values(8 * g.depth());
    Buffer<unsigned char> scratch(backend().scratch_size(&g, 1));
    const auto weights = reinterpret_cast<const std::uint16_t*>(values.data());
    ReadArgs args{};
    args.geometry = g;
    args.tokens = 1;
    args.eps = kSelftestEps;
    args.residual = args.w_norm = values.data();
    args.w_down = args.w_up = weights;
    args.mixed = args.lo = args.rs = values.data() + 4 * g.depth();
    args.scratch = scratch.data();
    const ReadChoice choice;
    return backend().read(&args, &choice, device, nullptr, report);
}

// What thread `i` calls first.
bool first_call(int device, int round, int i, Report* report) {
    sim::set_device(device);
    if (round % 2 == 0 || i % 3 == 0) return read(device, report);
    DeviceFacts facts{};
    if (i % 3 == 1) return backend().describe(device, &facts, report);
    return backend().check(device, nullptr, nullptr, report);
}

void round(int number) {
    std::string problem;
    const int device = sim::open_card("gfx1201", 1, &problem);
    const std::string scenario = "round " + std::to_string(number);
    const long before = gpu::planted_fault().reads[kHcRegisterHalf];
    std::atomic<int> waiting{kThreads}, good{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
        threads.emplace_back([&, i] {
            Report report;
            --waiting;
            while (waiting > 0) std::this_thread::yield();
            const bool done = first_call(device, number, i, &report);
            if (!done) std::fprintf(stderr, "%s\n", report.text);
            good += done;
        });
    }
    for (std::thread& t : threads) t.join();
    expect(good == kThreads, scenario, "good calls: " + std::to_string(good));
    DeviceFacts facts{};
    Report report;
    backend().describe(device, &facts, &report);
    expect(std::strcmp(facts.chosen, "p4") == 0, scenario, std::string(facts.chosen) + report.text);
    const long checks = gpu::planted_fault().reads[kHcRegisterHalf] - before;  // one case each
    expect(number % 2 != 0 || checks == 1, scenario, "checks: " + std::to_string(checks));
}

}  // namespace

int main() {
    setenv("STRATA_HC_SPLIT", "7", 1);
    unsetenv("STRATA_SELFTEST");
    use_stand_in();
    gpu::planted_fault().case_stride = kSelftestCases;
    backend().set_log([](LogLevel, const char*) {});
    for (int number = 0; number < kRounds; ++number) round(number);
    std::printf("%d threads, %d rounds: %d failed\n", kThreads, kRounds, failures);
    return failures == 0 ? 0 : 1;
}
