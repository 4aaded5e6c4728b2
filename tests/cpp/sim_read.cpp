// Every kernel of csrc/gpu on simulated cards, against the CPU backend, byte for byte. The kernels' source is compiled
// into this file.
//
// Compiled without STRATA_SIM_STRICT: every down variant, T = 1..8, every option, 32 and 64 lanes, several seeds; the
// first argument picks the lanes. With it, and with -fsanitize=thread: each kernel at T = 1, 4 and 8, each option once,
// under the detectors. Norm and up run once an option and not once a down variant, which nothing of theirs depends on.
// Streams of bf16, which only norm looks at, run with fewer T.
#include "gpu/launch.cu"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "cpu/read.hpp"

#if defined(STRATA_SIM_STRICT)
#include "sim/traffic.hpp"
#endif

namespace strata::gpu {

void report_error(Report* report, int code, const char* call) {
    report->code = code;
    report->say("%s: %s (%d): %s", call, error_name(code), code, error_text(code));
}

namespace {

constexpr float kEps = 1e-6f;

// Memory that starts on a boundary, with bytes that no kernel writes.
template <class T>
class Array {
  public:
    explicit Array(std::size_t size = 0)
        : size_(size), data_(static_cast<T*>(std::aligned_alloc(256, (size * sizeof(T) + 511) / 256 * 256))) {
        poison();
    }
    void poison() { std::memset(data_.get(), 0xcd, bytes()); }
    T* data() const { return data_.get(); }
    std::size_t bytes() const { return size_ * sizeof(T); }
    T& operator[](std::size_t i) { return data_.get()[i]; }

  private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    std::size_t size_;
    std::unique_ptr<T, Free> data_;
};

struct Inputs {
    Geometry geometry;
    std::int64_t tokens;
    Array<float> residual, w_norm, block_out, inject_prev;
    Array<std::uint16_t> w_down, w_up, w_inject;
    Array<std::uint16_t> residual_bf16, block_out_bf16;  // the others' upper halves
};

std::size_t size(std::int64_t a, std::int64_t b) { return static_cast<std::size_t>(a * b); }

// Values like a checkpoint's, with a NaN, an infinity and a stream of zeros among them.
Inputs make_inputs(const Geometry& g, std::int64_t tokens) {
    Inputs in{g,
              tokens,
              Array<float>(size(tokens, g.depth())),
              Array<float>(size(1, g.depth())),
              Array<float>(size(tokens, g.width)),
              Array<float>(size(tokens, g.streams)),
              Array<std::uint16_t>(size(g.rank, g.depth())),
              Array<std::uint16_t>(size(g.depth(), g.rank)),
              Array<std::uint16_t>(size(g.streams, g.depth())),
              Array<std::uint16_t>(size(tokens, g.depth())),
              Array<std::uint16_t>(size(tokens, g.width))};
    std::mt19937 random(static_cast<unsigned>(g.depth() + tokens));
    std::normal_distribution<float> normal;
    const auto floats = [&](Array<float>& out, float middle, float spread) {
        for (std::size_t i = 0; i < out.bytes() / sizeof(float); ++i) out[i] = middle + spread * normal(random);
    };
    const auto halves = [&](Array<std::uint16_t>& out, double spread) {
        for (std::size_t i = 0; i < out.bytes() / sizeof(std::uint16_t); ++i) {
            out[i] = static_cast<std::uint16_t>(float_bits(static_cast<float>(spread) * normal(random)) >> 16);
        }
    };
    floats(in.residual, 0.0f, 2.0f);
    floats(in.w_norm, 1.0f, 0.2f);
    floats(in.block_out, 0.0f, 1.0f);
    floats(in.inject_prev, 0.0f, 2.0f);
    halves(in.w_down, 1.5 / std::sqrt(static_cast<double>(g.depth())));
    halves(in.w_up, 4.0 / std::sqrt(static_cast<double>(g.rank)));
    halves(in.w_inject, 2.0 / std::sqrt(static_cast<double>(g.depth())));
    if (tokens > 3) {
        in.residual[size(1, g.depth()) + 5] = std::numeric_limits<float>::quiet_NaN();
        in.residual[size(2, g.depth()) + 7] = std::numeric_limits<float>::infinity();
        std::memset(&in.residual[size(3, g.depth())], 0, sizeof(float) * size(1, g.width));
    }
    const auto upper_halves = [](Array<std::uint16_t>& out, Array<float>& of) {
        for (std::size_t i = 0; i < out.bytes() / sizeof(std::uint16_t); ++i) {
            out[i] = static_cast<std::uint16_t>(float_bits(of[i]) >> 16);
        }
    };
    upper_halves(in.residual_bf16, in.residual);
    upper_halves(in.block_out_bf16, in.block_out);
    return in;
}

struct Outputs {
    Array<float> mixed, inject, residual_out, lo, rs;
    Array<std::uint8_t> q8_1;
    Outputs(const Geometry& g, std::int64_t tokens)
        : mixed(size(tokens, g.width)),
          inject(size(tokens, g.streams)),
          residual_out(size(tokens, g.depth())),
          lo(size(tokens, g.rank)),
          rs(size(tokens, g.streams)),
          q8_1(size(tokens, g.width / kQ8Block * kQ8Bytes)) {}
    void poison() {
        for (Array<float>* a : {&mixed, &inject, &residual_out, &lo, &rs}) a->poison();
        q8_1.poison();
    }
};

struct Options {
    bool fold;
    bool inject;
    bool q8_1;
    StreamType stream_type = StreamType::Float32;
    bool in_place = false;  // residual_out is residual, which has been copied there
};

ReadArgs read_args(const Inputs& in, const Outputs& out, std::int64_t tokens, Options options, void* scratch) {
    ReadArgs a{};
    a.geometry = in.geometry;
    a.tokens = tokens;
    a.eps = kEps;
    const bool bf16 = options.stream_type == StreamType::BFloat16;
    a.stream_type = options.stream_type;
    a.residual = bf16 ? static_cast<const void*>(in.residual_bf16.data()) : in.residual.data();
    a.w_norm = in.w_norm.data();
    a.w_down = in.w_down.data();
    a.w_up = in.w_up.data();
    a.mixed = out.mixed.data();
    a.lo = out.lo.data();
    a.rs = out.rs.data();
    a.scratch = scratch;
    if (options.fold) {
        a.block_out = bf16 ? static_cast<const void*>(in.block_out_bf16.data()) : in.block_out.data();
        a.inject_prev = in.inject_prev.data();
        a.residual_out = out.residual_out.data();
    }
    if (options.in_place) a.residual = a.residual_out;
    if (options.inject) {
        a.w_inject = in.w_inject.data();
        a.inject = out.inject.data();
    }
    if (options.q8_1) a.q8_1 = out.q8_1.data();
    return a;
}

// The CPU's answer for all tokens, everything asked for. A token's does not depend on the others.
Outputs cpu_answer(const Inputs& in, bool fold, StreamType stream_type = StreamType::Float32) {
    Outputs out(in.geometry, in.tokens);
    Array<char> scratch(static_cast<std::size_t>(cpu::scratch_size(in.geometry, in.tokens)));
    Report report;
    const bool done = cpu::read(
        read_args(in, out, in.tokens, {fold, true, true, stream_type}, scratch.data()), nullptr,
        [](std::int64_t begin, std::int64_t end, std::int64_t, void (*body)(std::int64_t, std::int64_t, void*),
           void* context) { body(begin, end, context); },
        &report);
    CHECK(done, report.text);
    return out;
}

// What runs, for messages.
struct Where {
    std::string card;
    std::uint64_t seed;
    std::int64_t tokens;
    std::string what;
};
std::ostream& operator<<(std::ostream& out, const Where& w) {
    return out << w.card << ", seed " << w.seed << ", T = " << w.tokens << ", " << w.what;
}

template <class T>
bool check_same(const Where& where, const char* name, const Array<T>& actual, const Array<T>& expected,
                std::size_t count) {
    const bool same = std::memcmp(actual.data(), expected.data(), count * sizeof(T)) == 0;
    std::size_t first = 0;
    while (!same && std::memcmp(actual.data() + first, expected.data() + first, sizeof(T)) == 0) ++first;
    CHECK(same, where, name, first);
    return same;
}

// residual_out, `count` elements of what the streams are made of.
void check_same_streams(const Where& where, const Array<float>& actual, const Array<float>& expected, std::size_t count,
                        StreamType type) {
    const std::size_t bytes = count * static_cast<std::size_t>(element_bytes(type));
    CHECK(std::memcmp(actual.data(), expected.data(), bytes) == 0, where, "residual_out", stream_name(type));
}

// A card and what it has declared.
class OpenCard {
  public:
    OpenCard(const std::string& name, std::uint64_t seed) : where{name, seed, 0, ""} {
        std::string problem;
        device = sim::open_card(name.c_str(), seed, &problem);
        CHECK(device >= 0, problem);
        sim::set_device(device);
        sim::device_card(device, &card);
        CHECK(query_device(device, &facts) == 0, card.arch);
        LaunchLimits left = limits();
        for (const GrVariant& row : kGrVariants) CHECK(fused_gr_prepare(row.value, &left) == 0, row.name);
        CHECK(left.overlaps == facts.overlaps && left.clusters == facts.clusters, card.arch);
    }
    ~OpenCard() { sim::withdraw(device); }
    OpenCard(const OpenCard&) = delete;
    OpenCard& operator=(const OpenCard&) = delete;

    template <class T>
    void lend(const char* name, const Array<T>& array, bool writable) const {
        sim::declare(device, name, array.data(), array.bytes(), writable, !writable);
    }
    void lend(const Inputs& in, const Outputs& out, const Array<char>& scratch) const {
        lend("residual", in.residual, false);
        lend("residual_bf16", in.residual_bf16, false);
        lend("w_norm", in.w_norm, false);
        lend("w_down", in.w_down, false);
        lend("w_up", in.w_up, false);
        lend("w_inject", in.w_inject, false);
        lend("block_out", in.block_out, false);
        lend("block_out_bf16", in.block_out_bf16, false);
        lend("inject_prev", in.inject_prev, false);
        lend("mixed", out.mixed, true);
        lend("inject", out.inject, true);
        lend("residual_out", out.residual_out, true);
        lend("lo", out.lo, true);
        lend("rs", out.rs, true);
        lend("q8_1", out.q8_1, true);
        lend("scratch", scratch, true);
    }

    LaunchLimits limits() const { return {card.shared_most, facts.overlaps, facts.clusters, facts.compute_units}; }

    int device = -1;
    sim::Card card;
    VendorDevice facts{};
    Where where;
};

// One kernel, waited for.
bool run(OpenCard& card, const std::string& what, const Named& kernel, dim3 grid, int block, std::size_t shared_bytes,
         const GroupArgs& args) {
    card.where.what = what;
    Report report;
    const Launcher launcher(nullptr, &report);
    bool good = launcher(kernel, grid, block, shared_bytes, args);
    if (const int code = stream_synchronize(nullptr)) {
        report_error(&report, code, kernel.name);
        good = false;
    }
    CHECK(good, card.where, report.text);
    return good;
}

struct Model {
    Inputs in = make_inputs(kModelGeometry, kMaxTokens);
    Outputs answers[2][2] = {{cpu_answer(in, false), cpu_answer(in, true)},
                             {cpu_answer(in, false, StreamType::BFloat16), cpu_answer(in, true, StreamType::BFloat16)}};
    Outputs out{kModelGeometry, kMaxTokens};
    Array<char> scratch{static_cast<std::size_t>(scratch_bytes(kModelGeometry, kMaxTokens))};

    const Outputs& answer(Options options) const {
        return answers[options.stream_type == StreamType::BFloat16 ? 1 : 0][options.fold ? 1 : 0];
    }
    GroupArgs args(int tokens, Options options) {
        return group_args(read_args(in, out, tokens, options, scratch.data()), 0, tokens);
    }
};

void check_norm(OpenCard& card, Model& m, int variant, int tokens, Options options) {
    m.out.residual_out.poison();
    m.out.rs.poison();
    const dim3 grid(static_cast<unsigned>(tokens), variant == kHcPlain ? 1 : kStreams);
    const NormKernels& norm = norm_kernels(options.stream_type);
    if (!run(card, fused_gr_find(variant)->name + std::string(" norm"), variant == kHcPlain ? norm.plain : norm.split,
             grid, kNormThreads, 0, m.args(tokens, options))) {
        return;
    }
    const Outputs& expected = m.answer(options);
    check_same(card.where, "rs", m.out.rs, expected.rs, size(tokens, kStreams));
    if (options.fold) {
        check_same_streams(card.where, m.out.residual_out, expected.residual_out, size(tokens, kDepth),
                           options.stream_type);
    }
}

void check_down(OpenCard& card, Model& m, int variant, int tokens, Options options) {
    m.out.lo.poison();
    m.out.inject.poison();
    const GroupArgs group = m.args(tokens, options);
    const int limit = down_token_limit(variant, card.card.shared_most);
    for (std::int64_t i = 0; i < part_count(tokens, limit); ++i) {
        const GroupArgs slice = down_part(group, token_part(tokens, limit, i));
        const DownPlan plan = down_plan(variant, slice.tokens, options.inject);
        if (!run(card, fused_gr_find(variant)->name + std::string(" down"), down_kernel(variant, plan),
                 dim3(static_cast<unsigned>(plan.grid)), plan.block, plan.shared_bytes, slice)) {
            return;
        }
    }
    const Outputs& expected = m.answer(options);
    check_same(card.where, "lo", m.out.lo, expected.lo, size(tokens, kRank));
    if (options.inject) check_same(card.where, "inject", m.out.inject, expected.inject, size(tokens, kStreams));
}

void check_up(OpenCard& card, Model& m, int columns, int tokens, Options options) {
    m.out.mixed.poison();
    m.out.q8_1.poison();
    const bool wide = columns == kUpWide;
    if (!run(card, std::to_string(columns) + "-column up", wide ? kUpWideKernel : kUpNarrowKernel,
             dim3(static_cast<unsigned>(kWidth / columns)), kUpThreads, 0, m.args(tokens, options))) {
        return;
    }
    const Outputs& expected = m.answer(options);
    check_same(card.where, "mixed", m.out.mixed, expected.mixed, size(tokens, kWidth));
    if (options.q8_1) check_same(card.where, "q8_1", m.out.q8_1, expected.q8_1, size(tokens, kQ8Columns * kQ8Bytes));
}

// A whole read, as the backend runs it; without clusters as on a card that has none.
void check_read(OpenCard& card, const Inputs& in, int variant, int columns, std::int64_t tokens, Options options,
                const Outputs& expected, bool clusters = true) {
    Outputs out(in.geometry, in.tokens);
    Array<char> scratch(static_cast<std::size_t>(scratch_bytes(in.geometry, tokens)));
    if (options.in_place) {
        const bool is_bf16 = options.stream_type == StreamType::BFloat16;
        const std::size_t bytes =
            size(tokens, in.geometry.depth()) * static_cast<std::size_t>(element_bytes(options.stream_type));
        std::memcpy(out.residual_out.data(),
                    is_bf16 ? static_cast<const void*>(in.residual_bf16.data()) : in.residual.data(), bytes);
        // Before the others are: it is found as what was declared first.
        sim::declare(card.device, "residual, in place", out.residual_out.data(), bytes, true, true);
    }
    card.lend(in, out, scratch);
    card.where.tokens = tokens;
    card.where.what = std::to_string(in.geometry.width) + "/" + std::to_string(in.geometry.streams) + "/" +
                      std::to_string(in.geometry.rank) + " " + fused_gr_find(variant)->name +
                      (clusters ? "" : " without clusters");
    Report report;
    LaunchLimits limits = card.limits();
    limits.clusters = limits.clusters && clusters;
    bool good = fused_gr_read_multi(read_args(in, out, tokens, options, scratch.data()), variant, columns, limits,
                                    nullptr, &report);
    if (const int code = stream_synchronize(nullptr)) {
        report_error(&report, code, "the read");
        good = false;
    }
    sim::withdraw(card.device);
    CHECK(good, card.where, report.text);
    if (!good) return;
    const Geometry& g = in.geometry;
    check_same(card.where, "mixed", out.mixed, expected.mixed, size(tokens, g.width));
    check_same(card.where, "lo", out.lo, expected.lo, size(tokens, g.rank));
    check_same(card.where, "rs", out.rs, expected.rs, size(tokens, g.streams));
    if (options.fold) {
        check_same_streams(card.where, out.residual_out, expected.residual_out, size(tokens, g.depth()),
                           options.stream_type);
    }
    if (options.inject) check_same(card.where, "inject", out.inject, expected.inject, size(tokens, g.streams));
    if (options.q8_1)
        check_same(card.where, "q8_1", out.q8_1, expected.q8_1, size(tokens, g.width / kQ8Block * kQ8Bytes));
}

constexpr int kDownVariants[] = {kHcPlain, kHcStaged, kHcRegisterHalf};  // split's is plain's

// ---------------------------------------------------------------------------------------------------------------------

#if !defined(STRATA_SIM_STRICT)

void check_everything(const char* lanes) {
    Model m;
    const bool wave64 = std::strcmp(lanes, "64") == 0;
    // Copies in the background are seen on the first card, a small shared memory on the second.
    const char* const cards[] = {wave64 ? "sm_90,64,98304,4" : "sm_90", wave64 ? "gfx942" : "gfx1201"};
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
        OpenCard card(cards[seed % 2], seed);
        card.lend(m.in, m.out, m.scratch);
        for (int tokens = 1; tokens <= kMaxTokens; ++tokens) {
            card.where.tokens = tokens;
            for (const bool fold : {false, true}) {
                if (seed >= 2 && fold != (seed == 2)) continue;
                for (const int variant : {kHcPlain, kHcSplit}) {
                    if (tokens != 1 && tokens != 5 && tokens != 8) continue;
                    const Options bf16{fold, false, false, StreamType::BFloat16};
                    check_norm(card, m, variant, tokens, bf16);
                    check_down(card, m, kHcPlain, tokens, bf16);
                }
                check_norm(card, m, kHcPlain, tokens, {fold, false, false});
                check_norm(card, m, kHcSplit, tokens, {fold, false, true});
                for (const bool inject : {false, true}) {
                    for (const int variant : kDownVariants) check_down(card, m, variant, tokens, {fold, inject, false});
                }
                check_up(card, m, kUpNarrow, tokens, {fold, false, false});
                check_up(card, m, kUpNarrow, tokens, {fold, false, true});
                check_up(card, m, kUpWide, tokens, {fold, false, true});
            }
        }
    }
}

// The stream variant, whose kernels have layouts of their own between them: whole reads.
void check_stream(const char* lanes) {
    const bool wave64 = std::strcmp(lanes, "64") == 0;
    const Inputs in = make_inputs(kModelGeometry, 11);
    const Outputs expected[] = {cpu_answer(in, false), cpu_answer(in, true)};
    // Shared memory for all instances, for four tokens, for two.
    // The last has clusters for two tokens only, so that one read takes both ways.
    const char* const cards[] = {wave64 ? "sm_90,64,232448,4" : "sm_90", wave64 ? "gfx942" : "gfx1201",
                                 wave64 ? "gfx90a,64,49152,4" : "gfx1201,32,49152,4",
                                 wave64 ? "sm_90,64,101376,4" : "sm_120"};
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
        OpenCard card(cards[seed], seed);
        for (const std::int64_t tokens : {1, 2, 3, 4, 5, 8, 11}) {
            for (const bool fold : {false, true}) {
                const bool q8_1 = fold == (tokens % 2 == 0);
                for (const bool clusters : {false, true}) {
                    if (clusters && !card.facts.clusters) continue;
                    check_read(card, in, kHcStream, 16, tokens, {fold, !q8_1 || fold, q8_1}, expected[fold], clusters);
                }
            }
        }
        const Options bf16{true, true, true, StreamType::BFloat16};
        const Outputs expected_bf16 = cpu_answer(in, true, StreamType::BFloat16);
        const Options in_place{true, true, true, StreamType::Float32, true};
        for (const bool clusters : {false, true}) {
            if (clusters && !card.facts.clusters) continue;
            check_read(card, in, kHcStream, 16, 6, bf16, expected_bf16, clusters);
            check_read(card, in, kHcStream, 16, 7, in_place, expected[1], clusters);
        }
    }
}

// The tiled kernels: whole reads, around the size of a tile.
void check_tiled(const char* lanes) {
    const bool wave64 = std::strcmp(lanes, "64") == 0;
    const Inputs in = make_inputs(kModelGeometry, 70);
    const Outputs expected[] = {cpu_answer(in, false), cpu_answer(in, true)};
    const char* const cards[] = {wave64 ? "sm_90,64,232448,4" : "sm_90", wave64 ? "gfx942" : "gfx1201"};
    for (std::uint64_t seed = 0; seed < 2; ++seed) {
        OpenCard card(cards[seed], seed);
        for (const std::int64_t tokens : {1, 8, 31, 32, 33, 70}) {
            const bool fold = (tokens % 2 == 0) == (seed == 0);
            for (const int variant : {kHcTiled, kHcTiledFew}) {
                check_read(card, in, variant, 16, tokens, {fold, tokens != 32, tokens != 8}, expected[fold]);
            }
        }
        const Options bf16{true, true, true, StreamType::BFloat16};
        const Outputs bf16_answer = cpu_answer(in, true, StreamType::BFloat16);
        for (const int variant : {kHcTiled, kHcTiledFew}) check_read(card, in, variant, 16, 40, bf16, bf16_answer);
    }
}

// Kernels that take the geometry, and reads of more tokens than a group has.
void check_geometries(const char* lanes) {
    const bool wave64 = std::strcmp(lanes, "64") == 0;
    for (const Geometry& g : {Geometry{96, 3, 24}, Geometry{32, 1, 8}, Geometry{64, 8, 40}, Geometry{1056, 2, 264}}) {
        const Inputs in = make_inputs(g, 17);
        for (const bool fold : {false, true}) {
            const Outputs expected = cpu_answer(in, fold);
            const Outputs expected_bf16 = cpu_answer(in, fold, StreamType::BFloat16);
            const bool large = g.width > 1000;
            for (std::uint64_t seed = 0; seed < (large ? 1 : 2); ++seed) {
                OpenCard card(wave64 ? "gfx90a" : "gfx1100", seed);
                for (const std::int64_t tokens : {1, 17}) {
                    const Options bf16{fold, true, true, StreamType::BFloat16};
                    check_read(card, in, kHcStaged, 16, tokens, bf16, expected_bf16);
                }
                for (const bool inject : {false, true}) {
                    for (const bool q8_1 : {false, true}) {
                        if (large && inject != q8_1) continue;
                        for (const std::int64_t tokens : {1, 2, 5, 8, 17}) {
                            check_read(card, in, kHcStaged, 16, tokens, {fold, inject, q8_1}, expected);
                        }
                    }
                }
            }
        }
    }
    const Inputs in = make_inputs(kModelGeometry, 17);
    const Outputs expected = cpu_answer(in, true);
    OpenCard card(wave64 ? "gfx942" : "gfx1200", 5);
    for (const GrVariant& variant : kGrVariants) {
        const bool other = variant.value == kHcRuntimeGeometry;
        check_read(card, in, variant.value, 32, other ? 2 : 17, {true, true, true}, expected);
    }
    const Options bf16{true, true, true, StreamType::BFloat16};
    check_read(card, in, kHcStaged, 32, 17, bf16, cpu_answer(in, true, StreamType::BFloat16));
}

#else

// One group of kernels with one set of options: norms, downs, ups.
void check_kernels(OpenCard& card, Model& m, int tokens, Options options, bool both_norms) {
    card.where.tokens = tokens;
    if (both_norms) check_norm(card, m, kHcPlain, tokens, options);
    check_norm(card, m, kHcSplit, tokens, options);
    for (const int variant : kDownVariants) check_down(card, m, variant, tokens, options);
    if (options.q8_1) check_up(card, m, kUpWide, tokens, options);
    check_up(card, m, kUpNarrow, tokens, options);
}

void check_strict() {
    Model m;
    const std::int64_t few = 3;
    const Inputs small = make_inputs({96, 3, 24}, few);
    const Outputs small_answer = cpu_answer(small, true);
    const Inputs stream = make_inputs(kModelGeometry, 7);
    const Outputs stream_answer = cpu_answer(stream, true), stream_unfolded_answer = cpu_answer(stream, false);
    const Outputs stream_bf16_answer = cpu_answer(stream, true, StreamType::BFloat16);
    const Options bf16{true, true, true, StreamType::BFloat16};
    const Outputs small_bf16_answer = cpu_answer(small, true, StreamType::BFloat16);
    for (const char* name : {"sm_90", "gfx942"}) {
        OpenCard card(name, 1);
        card.lend(m.in, m.out, m.scratch);
        check_kernels(card, m, 1, {false, false, false}, true);
        check_kernels(card, m, 4, {true, false, true}, false);
        check_kernels(card, m, 8, {true, true, true}, true);
        for (const int variant : {kHcPlain, kHcSplit}) {
            check_norm(card, m, variant, 8, bf16);
            check_down(card, m, kHcPlain, 8, bf16);
        }
        sim::withdraw(card.device);
        check_read(card, small, kHcStaged, 16, few, {true, true, true}, small_answer);
        check_read(card, small, kHcStaged, 16, few, bf16, small_bf16_answer);
        for (const std::int64_t tokens : {1, 2, 3, 7}) {
            check_read(card, stream, kHcStream, 16, tokens, {true, true, tokens != 2}, stream_answer);
            if (!card.facts.clusters) continue;
            check_read(card, stream, kHcStream, 16, tokens, {true, true, tokens != 2}, stream_answer, false);
        }
        const Options in_place{true, true, false, StreamType::Float32, true};
        for (const int variant : {kHcPlain, kHcSplit, kHcStream}) {
            check_read(card, stream, variant, 16, 3, in_place, stream_answer);
        }
        check_read(card, stream, kHcStream, 16, 2, {false, false, false}, stream_unfolded_answer);
        check_read(card, stream, kHcStream, 16, 4, {true, true, false, StreamType::BFloat16, true}, stream_bf16_answer);
        check_read(card, stream, kHcStream, 16, 7, bf16, stream_bf16_answer);
        for (const int variant : {kHcStaged, kHcRegisterHalf, kHcTiled, kHcTiledFew}) {
            check_read(card, stream, variant, 16, 7, {true, true, true}, stream_answer);
        }
    }
}

// Shared memory's banks and global memory's segments, on every profile.
void check_traffic() {
    Model m;
    std::string last;
    for (const char* name : {"gfx1200", "gfx1201", "gfx1100", "gfx942", "gfx90a", "sm_75", "sm_90", "sm_120"}) {
        OpenCard card(name, 1);
        card.lend(m.in, m.out, m.scratch);
        sim::traffic::count(true);
        check_kernels(card, m, 2, {true, true, true}, true);
        card.where.tokens = 5;  // another instance of staged and P4
        check_norm(card, m, kHcSplit, 5, {true, true, true});
        for (const int variant : {kHcStaged, kHcRegisterHalf}) check_down(card, m, variant, 5, {true, true, true});
        for (const auto& [kernel, counts] : sim::traffic::by_kernel()) {
            const bool tiles =
                kernel.find("staged") != std::string::npos || kernel.find("register_half") != std::string::npos;
            CHECK(!tiles || counts.shared_reads.accesses > 0, name, kernel);
            CHECK(!tiles || counts.shared_reads.conflicts == 0, name, kernel, counts.shared_reads.conflicts);
            CHECK(!tiles || counts.shared_writes.conflicts == 0, name, kernel, counts.shared_writes.conflicts);
        }
        // Cards with waves of one width and the same copies ask the same of memory.
        const std::string table = sim::traffic::table();
        std::cout << name << (table == last ? ": the same\n" : ":\n" + table);
        last = table;
        sim::traffic::count(false);
    }
}
#endif

}  // namespace
}  // namespace strata::gpu

int main(int count, char** arguments) {
    using namespace strata::gpu;
#if defined(STRATA_SIM_STRICT)
    if (count > 1 && std::strcmp(arguments[1], "traffic") == 0) {
        check_traffic();
    } else {
        check_strict();
    }
#else
    check_everything(count > 1 ? arguments[1] : "32");
    check_geometries(count > 1 ? arguments[1] : "32");
    check_stream(count > 1 ? arguments[1] : "32");
    check_tiled(count > 1 ? arguments[1] : "32");
#endif
    return strata::test::result();
}
