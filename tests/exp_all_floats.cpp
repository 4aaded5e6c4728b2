// exp_f32 at every float: all 2^32 bit patterns against the C library's double exp (right to 2^-52 of the value, which
// is 2^-29 of the units here). Built by the target of this name and run by hand: a minute or two.
//
//   exp_all_floats [threads]
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpp/exp_error.hpp"

namespace {

struct Kind {
    const char* name;
    std::uint64_t inputs = 0, not_nearest = 0;
    double worst = 0.0;
    float at = 0.0f;

    void add(float x, double error, bool nearest) {
        ++inputs;
        not_nearest += !nearest;
        if (error > worst) worst = error, at = x;
    }
    void add(const Kind& other) {
        inputs += other.inputs;
        not_nearest += other.not_nearest;
        if (other.worst > worst) worst = other.worst, at = other.at;
    }
    void print() const {
        std::printf("%-9s  %10" PRIu64 " inputs, %8" PRIu64
                    " not the nearest float, at most %.6f ulp at %.9g (0x%08x)\n",
                    name, inputs, not_nearest, worst, static_cast<double>(at), strata::float_bits(at));
    }
};

struct Found {
    Kind normal{"normal"}, subnormal{"subnormal"}, other{"0 or inf"};
};

// Every `step`-th float from `first` on.
void search(std::uint32_t first, std::uint32_t step, Found& found) {
    for (std::uint64_t bits = first; bits < (std::uint64_t{1} << 32); bits += step) {
        const float x = strata::bits_float(static_cast<std::uint32_t>(bits));
        const double truth = std::exp(static_cast<double>(x));
        const float result = strata::exp_f32(x), nearest = static_cast<float>(truth);
        Kind& kind = std::fpclassify(result) == FP_NORMAL      ? found.normal
                     : std::fpclassify(result) == FP_SUBNORMAL ? found.subnormal
                                                               : found.other;
        kind.add(x, strata::test::exp_error(x, truth), result == nearest || (x != x && result != result));
    }
}

}  // namespace

int main(int count, char** values) {
    const int asked = count > 1 ? std::atoi(values[1]) : static_cast<int>(std::thread::hardware_concurrency());
    const auto threads = static_cast<std::uint32_t>(asked < 1 ? 1 : asked);
    std::vector<Found> parts(threads);
    std::vector<std::thread> running;
    for (std::uint32_t t = 0; t < threads; ++t) running.emplace_back([&, t] { search(t, threads, parts[t]); });
    for (std::thread& thread : running) thread.join();

    Found all;
    for (const Found& part : parts) {
        all.normal.add(part.normal);
        all.subnormal.add(part.subnormal);
        all.other.add(part.other);
    }
    double worst = 0.0;
    for (const Kind* kind : {&all.normal, &all.subnormal, &all.other}) {
        kind->print();
        worst = kind->worst > worst ? kind->worst : worst;
    }
    return worst <= 1.0 ? 0 : 1;
}
