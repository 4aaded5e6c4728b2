// From arguments and a variant to launches: which kernels run, over which tokens, with what shared memory.
#include "gpu/vendor.hpp"  // first: it brings the device side of the maths functions

#include "common/launch_plan.hpp"
#include "gpu/cluster_down.cuh"
#include "gpu/cluster_up.cuh"
#include "gpu/down_plain.cuh"
#include "gpu/down_register_half.cuh"
#include "gpu/down_staged.cuh"
#include "gpu/faults.hpp"
#include "gpu/fused_gr.hpp"
#include "gpu/norm.cuh"
#include "gpu/runtime_geometry.cuh"
#include "gpu/stream_down.cuh"
#include "gpu/stream_up.cuh"
#include "gpu/tiled_down.cuh"
#include "gpu/tiled_up.cuh"
#include "gpu/up.cuh"

namespace strata::gpu {
namespace {

// A kernel with the name that errors give it.
struct Named {
    Kernel kernel;
    const char* name;
};

// The kernels that touch the streams, by what these are made of.
struct NormKernels {
    Named plain, split, stream, tiled, runtime;
};
constexpr NormKernels kNormFloat32{{gr_norm_kernel<kStreams, Float4>, "gr_norm_kernel (plain)"},
                                   {gr_norm_kernel<1, Float4>, "gr_norm_kernel (split)"},
                                   {gr_norm_kernel<1, Float4, ByQuarters>, "gr_norm_kernel (stream)"},
                                   {gr_norm_kernel<1, Float4, ByTiledLanes>, "gr_norm_kernel (tiled)"},
                                   {gr_norm_runtime_kernel<Float4>, "gr_norm_runtime_kernel"}};
constexpr NormKernels kNormBFloat16{{gr_norm_kernel<kStreams, Bf16x4>, "gr_norm_kernel (plain, bf16 streams)"},
                                    {gr_norm_kernel<1, Bf16x4>, "gr_norm_kernel (split, bf16 streams)"},
                                    {gr_norm_kernel<1, Bf16x4, ByQuarters>, "gr_norm_kernel (stream, bf16 streams)"},
                                    {gr_norm_kernel<1, Bf16x4, ByTiledLanes>, "gr_norm_kernel (tiled, bf16 streams)"},
                                    {gr_norm_runtime_kernel<Bf16x4>, "gr_norm_runtime_kernel (bf16 streams)"}};

constexpr const NormKernels& norm_kernels(StreamType type) {
    return type == StreamType::BFloat16 ? kNormBFloat16 : kNormFloat32;
}

constexpr Named kUpNarrowKernel{gr_up_kernel<kUpNarrow>, "gr_up_kernel (16 columns)"};
constexpr Named kUpWideKernel{gr_up_kernel<kUpWide>, "gr_up_kernel (32 columns)"};
constexpr Named kTiledFinish{gr_tiled_finish_kernel, "gr_tiled_finish_kernel"};
constexpr Named kTiledQuantise{gr_tiled_quantise_kernel, "gr_tiled_quantise_kernel"};
constexpr Named kDownRuntime{gr_down_runtime_kernel, "gr_down_runtime_kernel"};
constexpr Named kUpRuntime{gr_up_runtime_kernel, "gr_up_runtime_kernel"};

// The tiled kernels that come in shapes.
struct TiledKernels {
    Named down, up;
    unsigned row_blocks, up_blocks;  // of a tile of tokens
    int down_threads, up_threads;
    std::size_t down_bytes, up_bytes;
};
template <const TiledShape& kShape>
constexpr TiledKernels tiled_kernels_of(const char* down, const char* up) {
    constexpr int kAhead = kBackgroundCopies ? kShape.ahead : 1;
    return {{gr_tiled_down_kernel<kShape.down_rows, kShape.down_threads, kAhead>, down},
            {gr_tiled_up_kernel<kShape.up_columns, kShape.up_threads, kAhead>, up},
            kTiledRows / kShape.down_rows,
            kWidth / kShape.up_columns,
            kShape.down_threads,
            kShape.up_threads,
            tiled_down_bytes(kShape.down_rows, kAhead),
            tiled_up_bytes(kShape.up_columns, kAhead)};
}
constexpr TiledKernels kTiled = tiled_kernels_of<kTiledShape>("gr_tiled_down_kernel", "gr_tiled_up_kernel");
constexpr TiledKernels kTiledFew =
    tiled_kernels_of<kTiledFewShape>("gr_tiled_down_kernel (few tiles)", "gr_tiled_up_kernel (few tiles)");
constexpr const TiledKernels& tiled_kernels(int variant) { return variant == kHcTiledFew ? kTiledFew : kTiled; }
constexpr bool is_tiled(int variant) { return variant == kHcTiled || variant == kHcTiledFew; }

// The kernels that no plan chooses between, each with the first variant that needs it.
struct FixedKernel {
    int variant;
    Kernel kernel;
};
constexpr FixedKernel kFixedKernels[] = {
    {kHcPlain, kNormFloat32.plain.kernel},
    {kHcPlain, kNormBFloat16.plain.kernel},
    {kHcPlain, kUpNarrowKernel.kernel},
    {kHcPlain, kUpWideKernel.kernel},
    {kHcSplit, kNormFloat32.split.kernel},
    {kHcSplit, kNormBFloat16.split.kernel},
    {kHcStream, kNormFloat32.stream.kernel},
    {kHcStream, kNormBFloat16.stream.kernel},
    {kHcTiled, kNormFloat32.tiled.kernel},
    {kHcTiled, kNormBFloat16.tiled.kernel},
    {kHcTiled, kTiledFinish.kernel},
    {kHcTiled, kTiledQuantise.kernel},
    {kHcRuntimeGeometry, kNormFloat32.runtime.kernel},
    {kHcRuntimeGeometry, kNormBFloat16.runtime.kernel},
    {kHcRuntimeGeometry, kDownRuntime.kernel},
    {kHcRuntimeGeometry, kUpRuntime.kernel},
};

static_assert(kExactTokens == 4, "the instances below are the exact ones of launch_plan.hpp");

Kernel staged_instance(const DownPlan& plan) {
    if (!plan.exact) return gr_down_staged_kernel<kMaxTokens, false>;
    switch (plan.tokens) {
        case 1:
            return gr_down_staged_kernel<1, true>;
        case 2:
            return gr_down_staged_kernel<2, true>;
        case 3:
            return gr_down_staged_kernel<3, true>;
        default:
            return gr_down_staged_kernel<4, true>;
    }
}

Kernel register_half_instance(const DownPlan& plan) {
    if (!plan.exact) return gr_down_register_half_kernel<kMaxTokens, false>;
    switch (plan.tokens) {
        case 1:
            return gr_down_register_half_kernel<1, true>;
        case 2:
            return gr_down_register_half_kernel<2, true>;
        case 3:
            return gr_down_register_half_kernel<3, true>;
        default:
            return gr_down_register_half_kernel<4, true>;
    }
}

// The case that a new variant adds.
Named down_kernel(int variant, const DownPlan& plan) {
    switch (variant) {
        case kHcStaged:
            return {staged_instance(plan), "gr_down_staged_kernel"};
        case kHcRegisterHalf:
            return {register_half_instance(plan), "gr_down_register_half_kernel"};
        default:
            return {gr_down_plain_kernel, "gr_down_plain_kernel"};
    }
}

struct StreamKernels {
    Named down, up;
};

StreamKernels stream_kernels(int tokens) {
    constexpr const char* kDown = "gr_stream_down_kernel";
    constexpr const char* kUp = "gr_stream_up_kernel";
    switch (stream_instance(tokens)) {
        case 1:
            return {{gr_stream_down_kernel<1>, kDown}, {gr_stream_up_kernel<1>, kUp}};
        case 2:
            return {{gr_stream_down_kernel<2>, kDown}, {gr_stream_up_kernel<2>, kUp}};
        case 4:
            return {{gr_stream_down_kernel<4>, kDown}, {gr_stream_up_kernel<4>, kUp}};
        default:
            return {{gr_stream_down_kernel<kMaxTokens>, kDown}, {gr_stream_up_kernel<kMaxTokens>, kUp}};
    }
}

struct ClusterKernels {
    void (*down)(ClusterArgs);
    Named up;
};

template <int kTokens, class Four>
ClusterKernels cluster_instance(bool quantise) {
    if constexpr (kClusterLaunches) {
        constexpr const char* kUp = "gr_cluster_up_kernel";
        return {gr_cluster_down_kernel<kTokens, Four>, quantise
                                                           ? Named{gr_cluster_up_kernel<kTokens, Four, true>, kUp}
                                                           : Named{gr_cluster_up_kernel<kTokens, Four, false>, kUp}};
    } else {
        return {};
    }
}

template <class Four>
ClusterKernels cluster_kernels(int tokens, bool quantise) {
    switch (stream_instance(tokens)) {
        case 1:
            return cluster_instance<1, Four>(quantise);
        case 2:
            return cluster_instance<2, Four>(quantise);
        case 4:
            return cluster_instance<4, Four>(quantise);
        default:
            return cluster_instance<kMaxTokens, Four>(quantise);
    }
}

ClusterKernels cluster_kernels(StreamType type, int tokens, bool quantise) {
    return type == StreamType::BFloat16 ? cluster_kernels<Bf16x4>(tokens, quantise)
                                        : cluster_kernels<Float4>(tokens, quantise);
}

class Launcher {
  public:
    Launcher(Stream stream, Report* report, bool overlapping = false)
        : stream_(stream), report_(report), overlapping_(overlapping) {}

    bool overlapping() const { return overlapping_; }

    bool operator()(const Named& what, dim3 grid, int block, std::size_t shared_bytes, const GroupArgs& args) const {
        return succeeded(overlapping_ ? launch_overlapping(what.kernel, grid, block, shared_bytes, stream_, args)
                                      : launch(what.kernel, grid, block, shared_bytes, stream_, args),
                         what.name);
    }

    bool clusters(void (*kernel)(ClusterArgs), const char* name, int blocks, int block, std::size_t shared_bytes,
                  const ClusterArgs& args, int cluster) const {
        return succeeded(
            launch_clusters(kernel, dim3(static_cast<unsigned>(blocks)), block, shared_bytes, stream_, args, cluster),
            name);
    }

    // Or reports what went wrong with `what`.
    bool succeeded(int code, const char* what) const {
        if (code != 0) report_error(report_, code, what);
        return code == 0;
    }

  private:
    Stream stream_;
    Report* report_;
    bool overlapping_;
};

unsigned grid_size(std::int64_t blocks) { return static_cast<unsigned>(blocks); }

// `count` tokens of the read from token `first` on.
GroupArgs group_args(const ReadArgs& args, std::int64_t first, int count) {
    const Geometry& g = args.geometry;
    const auto at = [first](auto* pointer, std::int64_t token_size) {
        return pointer == nullptr ? nullptr : pointer + first * token_size;
    };
    auto* scratch = static_cast<char*>(args.scratch);
    GroupArgs group{};
    group.geometry = g;
    group.tokens = count;
    group.eps = args.eps;
    group.residual = stream_at(args.residual, args.stream_type, first * g.depth());
    group.block_out = stream_at(args.block_out, args.stream_type, first * g.width);
    group.inject_prev = at(args.inject_prev, g.streams);
    group.w_norm = args.w_norm;
    group.w_down = reinterpret_cast<const Chunk*>(args.w_down);
    group.w_up = reinterpret_cast<const Chunk*>(args.w_up);
    group.w_inject = reinterpret_cast<const Chunk*>(args.w_inject);
    group.residual_out = stream_at(args.residual_out, args.stream_type, first * g.depth());
    group.normalised = reinterpret_cast<float*>(scratch);
    group.row_sums = reinterpret_cast<float*>(scratch + scratch_sums_offset(g, args.tokens));
    group.tiled_lo = reinterpret_cast<float*>(scratch + scratch_lo_offset(g, args.tokens));
    group.rs = at(args.rs, g.streams);
    group.lo = at(args.lo, g.rank);
    group.inject = at(args.inject, g.streams);
    group.mixed = at(args.mixed, g.width);
    group.q8_1 = at(args.q8_1, g.width / kQ8Block * kQ8Bytes);
    group.counters = reinterpret_cast<unsigned*>(scratch + scratch_counter_offset(g, args.tokens));
    return group;
}

// The tokens of `group` that one launch of the down projection takes.
GroupArgs down_part(const GroupArgs& group, const TokenPart& part) {
    GroupArgs slice = group;
    slice.tokens = part.count;
    slice.normalised += part.first * kDepth;
    slice.lo += part.first * kRank;
    if (slice.inject != nullptr) slice.inject += part.first * kStreams;
    return slice;
}

bool read_group(const Launcher& launch, const GroupArgs& group, const NormKernels& norm, int variant, int q8_columns,
                std::size_t shared_limit) {
    const dim3 norm_grid(static_cast<unsigned>(group.tokens), variant == kHcPlain ? 1 : kStreams);
    if (!launch(variant == kHcPlain ? norm.plain : norm.split, norm_grid, kNormThreads, 0, group)) return false;

    const int limit = down_token_limit(variant, shared_limit);
    for (std::int64_t i = 0; i < part_count(group.tokens, limit); ++i) {
        const GroupArgs slice = down_part(group, token_part(group.tokens, limit, i));
        const DownPlan plan = down_plan(variant, slice.tokens, slice.w_inject != nullptr);
        const dim3 grid(static_cast<unsigned>(plan.grid));
        if (!launch(down_kernel(variant, plan), grid, plan.block, plan.shared_bytes, slice)) return false;
    }

    // Without q8_1 nothing is gained by the wider blocks.
    const bool wide = group.q8_1 != nullptr && q8_columns == kUpWide;
    return launch(wide ? kUpWideKernel : kUpNarrowKernel, dim3(kWidth / (wide ? kUpWide : kUpNarrow)), kUpThreads, 0,
                  group);
}

bool read_group_clusters(const Launcher& launch, const GroupArgs& group, StreamType type, std::size_t shared_limit) {
    const int instance = stream_instance(group.tokens);
    const ClusterKernels kernels = cluster_kernels(type, group.tokens, group.q8_1 != nullptr);
    const auto describe = [&](RowPieces* rows, const Chunk* weights, int count, const char* what) {
        const int piece_bytes = cluster_lanes(instance) * static_cast<int>(sizeof(Chunk));
        return launch.succeeded(
            describe_rows(rows, weights, count, kClusterRounds, cluster_blocks(instance), piece_bytes), what);
    };
    ClusterArgs args{group, {}, {}};
    return describe(&args.w_down, group.w_down, kRank, "describing w_down") &&
           (group.w_inject == nullptr || describe(&args.w_inject, group.w_inject, kStreams, "describing w_inject")) &&
           launch.clusters(kernels.down, "gr_cluster_down_kernel", kClusterDownBlocks, kStreamThreads,
                           cluster_down_bytes(instance), args, cluster_blocks(instance)) &&
           launch(kernels.up, dim3(kStreamUpBlocks), kStreamThreads, cluster_up_asked(instance, shared_limit), group);
}

bool read_group_stream(const Launcher& launch, const GroupArgs& group, const NormKernels& norm, StreamType type,
                       const LaunchLimits& limits) {
    if (cluster_fits(group.tokens, limits)) return read_group_clusters(launch, group, type, limits.shared_bytes);
    const int instance = stream_instance(group.tokens);
    const StreamKernels kernels = stream_kernels(group.tokens);
    const int asking_blocks = launch.overlapping() ? ByQuarters::kAskingBlocks / kStreams : 0;
    const int row_groups = kStreamRowGroups + (group.w_inject != nullptr ? 1 : 0);
    return launch(norm.stream, dim3(static_cast<unsigned>(group.tokens + asking_blocks), kStreams), kNormThreads, 0,
                  group) &&
           launch(kernels.down, dim3(static_cast<unsigned>(kQuarters * row_groups)), kStreamThreads,
                  stream_down_bytes(instance), group) &&
           launch(kernels.up, dim3(kStreamUpBlocks), kStreamThreads, stream_up_bytes(instance), group);
}

bool read_group_tiled(const Launcher& launch, const GroupArgs& group, const NormKernels& norm,
                      const TiledKernels& kernels, const LaunchLimits& limits) {
    const auto tokens = static_cast<unsigned>(group.tokens);
    const auto padded = static_cast<unsigned>(tiled_padded(group.tokens));
    const unsigned tiles = padded / kTiledTokens;
    const dim3 down_grid(kLanes / kTiledDownLanes, kernels.row_blocks, tiles);
    const dim3 up_grid(kernels.up_blocks, tiles);
    const std::size_t down_bytes = tiled_asked(kernels.down_bytes, down_grid.x * down_grid.y * tiles, limits);
    const std::size_t up_bytes = tiled_asked(kernels.up_bytes, up_grid.x * tiles, limits);
    return launch(norm.tiled, dim3(padded, kStreams), kNormThreads, 0, group) &&
           launch(kernels.down, down_grid, kernels.down_threads, down_bytes, group) &&
           launch(kTiledFinish, dim3(padded), kTiledFinishThreads, 0, group) &&
           launch(kernels.up, up_grid, kernels.up_threads, up_bytes, group) &&
           (group.q8_1 == nullptr ||
            launch(kTiledQuantise, dim3(tokens, kQ8Columns / kNormGroups), kNormThreads, 0, group));
}

bool read_group_runtime(const Launcher& launch, const GroupArgs& group, const NormKernels& norm) {
    const Geometry& g = group.geometry;
    const dim3 norm_grid(static_cast<unsigned>(group.tokens), grid_size(g.streams));
    const std::int64_t rows = g.rank + (group.w_inject != nullptr ? g.streams : 0);
    return launch(norm.runtime, norm_grid, kRuntimeThreads, 0, group) &&
           launch(kDownRuntime, dim3(grid_size(part_count(rows, kRuntimeGroups))), kRuntimeThreads, 0, group) &&
           launch(kUpRuntime, dim3(grid_size(g.width / kQ8Block)), kRuntimeThreads, 0, group);
}

// The kernels in clusters for up to `tokens` tokens, where they fit. All numbers of tokens have clusters or none: a
// card without room for eight blocks (some part of one) takes three launches.
int prepare_clusters(int tokens, LaunchLimits* limits) {
    if (!cluster_fits(tokens, *limits)) return 0;
    if (const int code = can_describe_rows(&limits->clusters)) return code;
    if (!limits->clusters) return 0;
    const std::size_t down_bytes = cluster_down_bytes(tokens);
    for (const StreamType type : {StreamType::Float32, StreamType::BFloat16}) {
        const auto down = cluster_kernels(type, tokens, false).down;
        if (const int code = allow_shared(down, down_bytes)) return code;
        for (const bool quantise : {false, true}) {
            const Kernel up = cluster_kernels(type, tokens, quantise).up.kernel;
            if (const int code = allow_shared(up, cluster_up_asked(tokens, limits->shared_bytes))) return code;
        }
        int room = 0;
        const int cluster = cluster_blocks(tokens);
        if (const int code = cluster_room(down, kClusterDownBlocks, kStreamThreads, down_bytes, cluster, &room)) {
            return code;
        }
        limits->clusters = limits->clusters && room > 0;
    }
    return 0;
}

}  // namespace

bool fused_gr_read_multi(const ReadArgs& args, int variant, int q8_columns, const LaunchLimits& limits, Stream stream,
                         Report* report) {
    const bool tuned = args.geometry == kModelGeometry && variant != kHcRuntimeGeometry;
    if (fault_before_read(tuned ? variant : kHcRuntimeGeometry, args.stream_type)) return true;
    const bool streams = tuned && variant == kHcStream;
    const bool tiled = tuned && is_tiled(variant);
    const Launcher launcher(stream, report, tuned && limits.overlaps && fused_gr_overlaps(variant));
    const NormKernels& norm = norm_kernels(args.stream_type);
    const int group_limit = tiled ? kTiledGroup : streams ? stream_token_limit(limits.shared_bytes) : kMaxTokens;
    for (std::int64_t i = 0; i < part_count(args.tokens, group_limit); ++i) {
        const TokenPart part = token_part(args.tokens, group_limit, i);
        const GroupArgs group = group_args(args, part.first, part.count);
        const bool queued = !tuned    ? read_group_runtime(launcher, group, norm)
                            : streams ? read_group_stream(launcher, group, norm, args.stream_type, limits)
                            : tiled   ? read_group_tiled(launcher, group, norm, tiled_kernels(variant), limits)
                                      : read_group(launcher, group, norm, variant, q8_columns, limits.shared_bytes);
        if (!queued) return false;
    }
    fault_after_read(args, stream);
    return true;
}

int fused_gr_prepare(int variant, LaunchLimits* limits) {
    const std::size_t shared_limit = limits->shared_bytes;
    for (const FixedKernel& fixed : kFixedKernels) {
        if (fixed.variant != variant) continue;
        bool overlaps = false;
        if (const int code = preload(fixed.kernel, &overlaps)) return code;
        limits->overlaps = limits->overlaps && overlaps;
        limits->clusters = limits->clusters && overlaps;
    }
    if (variant == kHcRuntimeGeometry) return 0;
    if (variant == kHcStream) {
        for (const int tokens : kStreamInstances) {
            if (tokens > stream_token_limit(shared_limit)) break;
            const StreamKernels kernels = stream_kernels(tokens);
            if (const int code = allow_shared(kernels.down.kernel, stream_down_bytes(tokens))) return code;
            if (const int code = allow_shared(kernels.up.kernel, stream_up_bytes(tokens))) return code;
            if (const int code = prepare_clusters(tokens, limits)) return code;
        }
        return 0;
    }
    if (is_tiled(variant)) {
        const TiledKernels& kernels = tiled_kernels(variant);
        const auto most = [&](std::size_t bytes) { return tiled_asked(bytes, 1, *limits); };
        if (const int code = allow_shared(kernels.down.kernel, most(kernels.down_bytes))) return code;
        return allow_shared(kernels.up.kernel, most(kernels.up_bytes));
    }
    Kernel before = nullptr;
    for (int tokens = down_token_limit(variant, shared_limit); tokens > 0; --tokens) {
        const DownPlan plan = down_plan(variant, tokens, true);
        const Kernel kernel = down_kernel(variant, plan).kernel;
        if (kernel == before) continue;  // an instance for any number of tokens was met with the most bytes
        before = kernel;
        if (const int code = plan.large_shared ? allow_shared(kernel, plan.shared_bytes) : preload(kernel)) return code;
    }
    return 0;
}

}  // namespace strata::gpu
