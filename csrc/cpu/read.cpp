// A read on the CPU: chooses a path, cuts the tokens into passes over the weights, and hands the steps of each pass to
// the threads.
#include "cpu/read.hpp"

#include <cstring>
#include <string>

#include "common/launch_plan.hpp"
#include "cpu/ieee_mode.hpp"
#include "cpu/steps.hpp"

namespace strata::cpu {
namespace {

struct Path {
    const Steps* steps;
    bool (*here)();  // does this processor, with its operating system, have it?
};

// The slowest first. The last one that is here is the default.
constexpr Path kPaths[] = {
    {&kPortable, [] { return true; }},
#if defined(__x86_64__)
    {&kAvx2, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
    {&kAvx512,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     }},
#endif
};

struct Available {
    std::string names;
    const Steps* fastest = nullptr;

    Available() {
        for (const Path& path : kPaths) {
            if (!path.here()) continue;
            if (!names.empty()) names += ',';
            names += path.steps->name;
            fastest = path.steps;
        }
    }
};

const Available& available() {
    static const Available found;
    return found;
}

const Steps* find(const char* name) {
    if (name == nullptr) return available().fastest;
    for (const Path& path : kPaths) {
        if (std::strcmp(path.steps->name, name) == 0) return path.here() ? path.steps : nullptr;
    }
    return nullptr;
}

// Below this many values read or computed a step is over before another thread has woken up.
constexpr std::int64_t kInline = 1 << 17;

struct Work {
    const Pass* pass;
    Step step;
};

void run_part(std::int64_t begin, std::int64_t end, void* context) {
    const Work& work = *static_cast<const Work*>(context);
    const IeeeMode mode;
    work.step(*work.pass, begin, end);
}

void run(const Pass& pass, Step step, std::int64_t units, std::int64_t values, ParallelFor parallel_for) {
    Work work{&pass, step};
    if (values < kInline || units < 2) {
        run_part(0, units, &work);
    } else {
        parallel_for(0, units, 1, run_part, &work);
    }
}

// `all`, from token `first` on.
ReadArgs move_to(const ReadArgs& all, std::int64_t first, std::int64_t tokens) {
    const Geometry& g = all.geometry;
    ReadArgs part = all;
    part.tokens = tokens;
    part.residual = stream_at(all.residual, all.stream_type, first * g.depth());
    part.mixed += first * g.width;
    part.lo += first * g.rank;
    part.rs += first * g.streams;
    if (all.inject != nullptr) part.inject += first * g.streams;
    if (all.q8_1 != nullptr) part.q8_1 += first * (g.width / kQ8Block) * kQ8Bytes;
    if (all.block_out != nullptr) {
        part.block_out = stream_at(all.block_out, all.stream_type, first * g.width);
        part.inject_prev += first * g.streams;
        part.residual_out = stream_at(all.residual_out, all.stream_type, first * g.depth());
    }
    return part;
}

}  // namespace

const char* paths() { return available().names.c_str(); }

const char* default_path() { return available().fastest->name; }

std::int64_t scratch_size(const Geometry& geometry, std::int64_t tokens) {
    const std::int64_t floats = room(geometry.depth()) + room(geometry.rank);
    return (tokens < kPassTokens ? tokens : kPassTokens) * floats * static_cast<std::int64_t>(sizeof(float));
}

bool read(const ReadArgs& args, const char* path, ParallelFor parallel_for, Report* report) {
    const Steps* steps = find(path);
    if (steps == nullptr) {
        report->say("the CPU path '%s' is not available here; available: %s", path, paths());
        return false;
    }
    const Geometry& g = args.geometry;
    const std::int64_t most = args.tokens <= kTwiceFewTokens ? kFewTokens : kPassTokens;
    const std::int64_t passes = part_count(args.tokens, most);
    for (std::int64_t i = 0; i < passes; ++i) {
        const TokenPart part = token_part(args.tokens, most, i);
        float* const scratch = static_cast<float*>(args.scratch);
        const std::int64_t values = part.count * g.depth();
        const Pass pass{move_to(args, part.first, part.count),
                        {scratch, g.depth() / kChunk, part.count},
                        {scratch + part.count * room(g.depth()), g.rank / kChunk, part.count}};
        run(pass, steps->norm, norm_units(pass), values, parallel_for);
        run(pass, steps->down, down_units(pass.args), values * g.rank, parallel_for);
        run(pass, steps->up, up_units(pass.args), values * g.rank, parallel_for);
    }
    return true;
}

}  // namespace strata::cpu
