// How a read's tokens are cut into launches, and what each launch of the down projection asks of the card. Pure rules:
// gpu/launch.cu follows them, the tests and `strata_ops info` ask them.
#pragma once

#include <array>
#include <cstddef>

#include "common/fused_gr_policy.hpp"
#include "common/geometry.hpp"

namespace strata {

// The tuned down kernels: a row a group of lanes, eight rows a block, and one more block for the inject rows.
inline constexpr int kDownThreads = 256;
inline constexpr int kDownRows = kDownThreads / kLanes;
inline constexpr int kDownBlocks = static_cast<int>(kModelGeometry.rank) / kDownRows;
inline constexpr int kTile = static_cast<int>(kModelGeometry.width) / 2;  // floats of one token in an activation tile
inline constexpr int kTiles = static_cast<int>(kModelGeometry.depth()) / kTile;
inline constexpr int kTileFloat4s = kTile / 4;
inline constexpr int kTileChunks = kTile / kChunk;
inline constexpr int kTileRounds = kTileChunks / kLanes;  // chunks of a tile that one lane takes

static_assert(kModelGeometry.rank % kDownRows == 0 && kModelGeometry.streams <= kDownRows);
static_assert(kTileChunks % kLanes == 0, "a lane's chunks stay its own across tiles");
static_assert(kDownThreads % 64 == 0, "whole waves on 64-lane cards");

// The up kernel's columns a block: narrow blocks share a q8_1 block in pairs, wide ones own whole q8_1 blocks.
inline constexpr int kUpNarrow = kQ8Block / 2;
inline constexpr int kUpWide = kQ8Block;

// Exact-token instances exist up to this many tokens; above, one instance serves any number up to kMaxTokens.
// (On gfx1201 both compilers spill an exact P4 at 8 tokens, and need 224 registers at 6.)
inline constexpr int kExactTokens = 4;

// Shared memory that any card gives a block without asking.
inline constexpr std::size_t kPlainSharedLimit = 48 * 1024;

// What the launches of one kernel have in common. Staged and P4 take theirs from the same call.
struct DownPlan {
    int grid;
    int block;
    std::size_t shared_bytes;  // dynamic, for `tokens`
    int tokens;
    bool exact;         // an exact-token instance
    bool large_shared;  // maximum dynamic size and 100 % carve-out are asked for
};

// What a card allows a launch.
struct LaunchLimits {
    std::size_t shared_bytes;  // most that a block may ask for
    bool overlaps = false;     // a launch may begin before the one ahead of it has ended
    bool clusters = false;     // blocks of a launch can share their shared memory
    int compute_units = 0;     // 0: not known
};

constexpr std::size_t down_shared_bytes(int variant, int tokens) {
    const int tiles = (variant == kHcStaged || variant == kHcRegisterHalf) ? 2 : 1;
    return static_cast<std::size_t>(tiles) * static_cast<std::size_t>(tokens) * kTile * sizeof(float);
}

// ---------------------------------------------------------------------------------------------------------------
// The stream variant: four blocks share ten rows of w_down, a quarter of the lanes each, and a block of the up kernel
// has twenty columns in all streams. On 132 multiprocessors, 128 blocks and four for the inject rows are one each.

inline constexpr int kQuarters = 4;
inline constexpr int kQuarterLanes = kLanes / kQuarters;
inline constexpr int kQuarterChunks = static_cast<int>(kModelGeometry.depth()) / kChunk / kQuarters;
inline constexpr int kStreamRows = 10;
inline constexpr int kStreamRowGroups = static_cast<int>(kModelGeometry.rank) / kStreamRows;
inline constexpr int kStreamColumns = 20;
inline constexpr int kStreamUpBlocks = static_cast<int>(kModelGeometry.width) / kStreamColumns;
inline constexpr int kStreamUpRows = kStreamColumns * static_cast<int>(kModelGeometry.streams);
inline constexpr int kStreamUpRowChunks = static_cast<int>(kModelGeometry.rank) / kChunk;
inline constexpr int kStreamThreads = kQuarterChunks;  // a thread has one chunk of each row

static_assert(kStreamThreads % 64 == 0 && kStreamThreads == kStreamUpRows * 4,
              "a thread for each quarter of an up row");
static_assert(kStreamUpRows * kStreamUpRowChunks == kStreamRows * kStreamThreads, "as many weights of either matrix");

// An instance takes up to so many tokens, four at a time.
inline constexpr int kStreamInstances[] = {1, 2, 4, kMaxTokens};
constexpr int stream_instance(int tokens) {
    for (const int instance : kStreamInstances) {
        if (tokens <= instance) return instance;
    }
    return kMaxTokens;
}
constexpr int stream_pass(int instance) { return instance < 4 ? instance : 4; }

// The dots of a row's chunks wait in shared memory to be added in order; rows of fewer than four tokens are padded so
// that those who add do not meet in a bank.
constexpr int stream_down_stride(int instance) { return instance < 4 ? kQuarterChunks + 8 : kQuarterChunks; }
constexpr int stream_up_stride(int instance) { return instance < 4 ? kStreamUpRowChunks + 4 : kStreamUpRowChunks; }

constexpr std::size_t stream_down_bytes(int instance) {
    return static_cast<std::size_t>(instance) * kStreamRows * static_cast<std::size_t>(stream_down_stride(instance)) *
           sizeof(float);
}
constexpr std::size_t stream_up_bytes(int instance) {
    const int dots = kStreamUpRows * stream_up_stride(instance);
    const int lo = static_cast<int>(kModelGeometry.rank);
    const int gates_and_values = 2 * kStreamUpRows;
    return static_cast<std::size_t>(instance) * static_cast<std::size_t>(dots + lo + gates_and_values) * sizeof(float);
}

constexpr int stream_token_limit(std::size_t shared_limit) {
    int limit = 1;
    for (const int instance : kStreamInstances) {
        if (stream_up_bytes(instance) <= shared_limit && stream_down_bytes(instance) <= shared_limit) limit = instance;
    }
    return limit;
}

// On cards with clusters the blocks of a cluster share out the lanes of its rows, of w_down and of the inject weights.
// An H200 has room for 30 clusters of four or 15 of eight with a multiprocessor for each block. (Eight read less of the
// activations each; for one token four are as fast, and a thread then has one chunk of a row in either case.)
inline constexpr int kClusterDownBlocks = 120;
STRATA_HOST_DEVICE constexpr int cluster_lanes(int instance) { return instance == 1 ? 8 : 4; }  // of a block
STRATA_HOST_DEVICE constexpr int cluster_blocks(int instance) { return kLanes / cluster_lanes(instance); }
STRATA_HOST_DEVICE constexpr int cluster_count(int instance) { return kClusterDownBlocks / cluster_blocks(instance); }
STRATA_HOST_DEVICE constexpr int cluster_rows_at_least(int instance) {
    return static_cast<int>(kModelGeometry.rank) / cluster_count(instance);
}
STRATA_HOST_DEVICE constexpr int cluster_rows(int instance) {  // at most
    const int rows = static_cast<int>(kModelGeometry.rank + kModelGeometry.streams);
    return (rows + cluster_count(instance) - 1) / cluster_count(instance);
}
STRATA_HOST_DEVICE constexpr int cluster_finished(int instance) {  // rows that a block finishes, at most
    return (cluster_rows(instance) + cluster_blocks(instance) - 1) / cluster_blocks(instance);
}
STRATA_HOST_DEVICE constexpr int cluster_positions(int instance) {  // chunks of a row that a block has
    return static_cast<int>(kModelGeometry.depth()) / kChunk / cluster_blocks(instance);
}
inline constexpr int kClusterRounds = static_cast<int>(kModelGeometry.depth()) / kChunk / kLanes;  // chunks of a lane
// The rows whose weights a block asks for ahead of the fold; for the others it asks once the activations are here.
// (All wait for the warp that asks, some 50 cycles a row; all of them later is slower still.)
STRATA_HOST_DEVICE constexpr int cluster_rows_first(int instance) { return instance == 1 ? 8 : 12; }
// The rows, the last ones, whose dots lie over weights that have been read: so blocks of up fit beside one of down.
STRATA_HOST_DEVICE constexpr int cluster_rows_over_weights(int instance) { return instance > 2 ? 2 : 0; }
// Dots behind those of a row and group of tokens, so that those who add do not meet in a bank.
STRATA_HOST_DEVICE constexpr int cluster_dots_padding(int instance) { return cluster_lanes(instance); }

// The first of `rows` rows that cluster `cluster` of `count` has; the next cluster's first is where they end.
STRATA_HOST_DEVICE constexpr int cluster_first_row(int cluster, int rows, int count) { return cluster * rows / count; }

inline constexpr std::size_t kRowAlignment = 128;  // what copies of pieces of rows ask of shared memory
// Dots, weights, sums of lanes, norms and what is waited for.
constexpr std::size_t cluster_down_bytes(int instance) {
    const auto aligned = [](std::size_t bytes) { return (bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment; };
    const int rows = cluster_rows(instance);
    const int positions = cluster_positions(instance);
    const int row_dots = instance * (positions + cluster_dots_padding(instance));
    const int dots = (rows - cluster_rows_over_weights(instance)) * row_dots;
    const int weights = rows * positions * kAlignment;
    const int lane_sums = instance * cluster_finished(instance) * kLanes;
    const int norms = (kNormGroups + instance) * static_cast<int>(kModelGeometry.streams);
    const auto floats = static_cast<std::size_t>(lane_sums + norms);
    return aligned(aligned(static_cast<std::size_t>(dots) * sizeof(float)) + static_cast<std::size_t>(weights) +
                   floats * sizeof(float) + 3 * kAlignment);
}

// Chunks behind each stream's weights, so that threads with one column of the four do not meet in a bank.
inline constexpr int kClusterUpPadding = 2;
// Weights, lo, values, and what is waited for.
constexpr std::size_t cluster_up_bytes(int instance) {
    const int streams = static_cast<int>(kModelGeometry.streams);
    const int weights = (kStreamUpRows * kStreamUpRowChunks + streams * kClusterUpPadding) * kAlignment;
    const int lo_and_values = static_cast<int>(kModelGeometry.rank) + kStreamUpRows;
    return static_cast<std::size_t>(weights) +
           static_cast<std::size_t>(instance) * static_cast<std::size_t>(lo_and_values) * sizeof(float) + kAlignment;
}

// What the up kernel asks for: more than half of a multiprocessor's, so that no two of its blocks share one while
// others have none. Where a block of the down kernel leaves less than that (eight tokens), registers see to it:
// kClusterUpHeldRegisters. (bench/NOTES.md has what it gains.)
inline constexpr std::size_t kReserved = 1024;  // that each block costs besides
constexpr std::size_t cluster_up_asked(int instance, std::size_t shared_limit) {
    const std::size_t own = cluster_up_bytes(instance);
    const std::size_t alone = shared_limit / 2 + kReserved;
    const std::size_t down = cluster_down_bytes(instance) + kReserved;
    return alone < own || down + alone > shared_limit ? own : alone;
}

constexpr bool cluster_fits(int tokens, const LaunchLimits& limits) {
    return limits.clusters && cluster_down_bytes(stream_instance(tokens)) <= limits.shared_bytes;
}

// ---------------------------------------------------------------------------------------------------------------
// The tiled kernels, for reads of many tokens: tiles of rows times tiles of tokens, as in a matrix product.

inline constexpr int kTiledTokens = 32;     // of a tile
inline constexpr int kTiledGroup = 1024;    // tokens of one group of launches at most, which bounds the scratch
inline constexpr int kTiledDownLanes = 4;   // of a block
inline constexpr int kTiledDownChunks = 2;  // of a lane, in a step
inline constexpr int kTiledRows = static_cast<int>(kModelGeometry.rank + kModelGeometry.streams);
inline constexpr int kTiledFinishThreads = 384;  // a thread for each of kTiledRows
static_assert(kTiledRows <= kTiledFinishThreads && kTiledFinishThreads % 64 == 0);
static_assert(kTiledGroup % kTiledTokens == 0);

// What a block has besides its tile of tokens: rows of down, columns of up. Down has nine rows a thread or three, up
// two columns. `ahead` is how many steps ahead it asks for what it multiplies, where copies go on in the background.
struct TiledShape {
    int down_rows, down_threads;
    int up_columns, up_threads;
    int ahead;
};
inline constexpr TiledShape kTiledShape{36, 128, 16, 128, 1};
inline constexpr TiledShape kTiledFewShape{12, 128, 8, 64, 3};  // for few tiles of tokens: kHcTiledFew

// Steps in shared memory: for each of `groups` groups of threads, chunks of `rows` rows, widened and padded, of this
// step and the next one; of the tile's tokens, and of the rows as they come, for those asked for ahead too.
STRATA_HOST_DEVICE constexpr int tiled_padding(int groups) { return 8 / groups; }
// Places for rows as they come. For several steps one fewer would do; with as many places as activations have, the
// compiler knows which are a step's.
STRATA_HOST_DEVICE constexpr int tiled_asked_places(int ahead) { return ahead == 1 ? 1 : ahead + 1; }
STRATA_HOST_DEVICE constexpr std::size_t tiled_steps_bytes(int groups, int chunks, int rows, int ahead) {
    const int weights = 2 * 2 * (rows + tiled_padding(groups));
    const int activations = (ahead + 1) * 2 * kTiledTokens;
    const int asked = tiled_asked_places(ahead) * rows;
    return std::size_t{kAlignment} * static_cast<std::size_t>(groups * chunks * (weights + activations + asked));
}
STRATA_HOST_DEVICE constexpr std::size_t tiled_down_bytes(int rows, int ahead) {
    return tiled_steps_bytes(kTiledDownLanes, kTiledDownChunks, rows, ahead);
}
// And two sums of each row and token.
STRATA_HOST_DEVICE constexpr std::size_t tiled_up_bytes(int columns, int ahead) {
    const int rows = columns * static_cast<int>(kModelGeometry.streams);
    return tiled_steps_bytes(2, 1, rows, ahead) + sizeof(float) * static_cast<std::size_t>(2 * 2 * kTiledTokens * rows);
}
constexpr bool tiled_shape_fits(const TiledShape& shape) {
    return kTiledRows % shape.down_rows == 0 && kModelGeometry.width % shape.up_columns == 0 &&
           tiled_down_bytes(shape.down_rows, shape.ahead) <= kPlainSharedLimit &&
           tiled_up_bytes(shape.up_columns, shape.ahead) <= kPlainSharedLimit;
}
static_assert(tiled_shape_fits(kTiledShape) && tiled_shape_fits(kTiledFewShape), "they run on every card");

// What a block of an overlapping launch asks for: so much that no unit takes more blocks than each would have if they
// were shared out evenly. A launch that begins while the one ahead of it still fills most units would otherwise gather
// on the others. (H200, 32 tokens: 30 us instead of 37.)
constexpr std::size_t tiled_asked(std::size_t bytes, unsigned blocks, const LaunchLimits& limits) {
    if (!limits.overlaps || limits.compute_units < 1) return bytes;
    const auto units = static_cast<unsigned>(limits.compute_units);
    const std::size_t fair = (blocks + units - 1) / units;
    const std::size_t one_too_many = (limits.shared_bytes + kReserved) / (fair + 1) / 128 * 128 + 128;
    return one_too_many > bytes ? one_too_many : bytes;
}

constexpr std::int64_t tiled_padded(std::int64_t tokens) {
    return (tokens + kTiledTokens - 1) / kTiledTokens * kTiledTokens;
}

// ---------------------------------------------------------------------------------------------------------------

// Tokens that one launch of the down projection takes on a card whose blocks may have `shared_limit` bytes.
constexpr int down_token_limit(int variant, std::size_t shared_limit) {
    if (variant == kHcStream) return stream_token_limit(shared_limit);
    const std::size_t fit = shared_limit / down_shared_bytes(variant, 1);
    return fit < static_cast<std::size_t>(kMaxTokens) ? static_cast<int>(fit) : kMaxTokens;
}

constexpr DownPlan down_plan(int variant, int tokens, bool inject) {
    const bool tuned_tiles = variant == kHcStaged || variant == kHcRegisterHalf;
    return {kDownBlocks + (inject ? 1 : 0),        kDownThreads, down_shared_bytes(variant, tokens), tokens,
            tuned_tiles && tokens <= kExactTokens, tuned_tiles};
}

// `total` tokens in as few parts of at most `limit` as possible, of sizes that differ by one at most: two launches of
// four tokens cost less than one of six and one of two, whose weights are read as often. Part `index` of them.
constexpr std::int64_t part_count(std::int64_t total, std::int64_t limit) { return (total + limit - 1) / limit; }

struct TokenPart {
    std::int64_t first;
    int count;
};

constexpr TokenPart token_part(std::int64_t total, std::int64_t limit, std::int64_t index) {
    const std::int64_t parts = part_count(total, limit);
    const std::int64_t small = total / parts;
    const std::int64_t larger = total % parts;  // the first `larger` parts take one more
    const std::int64_t before = index < larger ? index : larger;
    return {index * small + before, static_cast<int>(small + (index < larger ? 1 : 0))};
}

// ---------------------------------------------------------------------------------------------------------------
// Scratch of one call: the normalised activations of one group of tokens, what the stream variant or the tiled kernels
// keep of its rows, then a counter for each q8_1 block column.

// Tokens of the largest group that some variant makes of `tokens`.
constexpr std::int64_t group_tokens(const Geometry& g, std::int64_t tokens) {
    if (g != kModelGeometry) return tokens < kMaxTokens ? tokens : kMaxTokens;
    return tokens < kTiledGroup ? tiled_padded(tokens) : kTiledGroup;
}

inline constexpr int kRowSums = 8;             // stream's, of a row and token: one for each lane number modulo eight
inline constexpr int kTiledSums = kLanes / 2;  // the tiled kernels': one for each lane number modulo sixteen
static_assert(kRowSums <= kTiledSums);

constexpr std::int64_t scratch_sums_offset(const Geometry& g, std::int64_t tokens) {
    return group_tokens(g, tokens) * g.depth() * static_cast<std::int64_t>(sizeof(float));
}
constexpr std::int64_t scratch_lo_offset(const Geometry& g, std::int64_t tokens) {
    const std::int64_t sums = g == kModelGeometry ? group_tokens(g, tokens) * kTiledRows * kTiledSums : 0;
    return scratch_sums_offset(g, tokens) + sums * static_cast<std::int64_t>(sizeof(float));
}
constexpr std::int64_t scratch_counter_offset(const Geometry& g, std::int64_t tokens) {
    const std::int64_t lo = g == kModelGeometry ? group_tokens(g, tokens) * g.rank : 0;
    return scratch_lo_offset(g, tokens) + lo * static_cast<std::int64_t>(sizeof(float));
}

constexpr std::int64_t scratch_bytes(const Geometry& g, std::int64_t tokens) {
    return scratch_counter_offset(g, tokens) + g.width / kQ8Block * static_cast<std::int64_t>(sizeof(unsigned));
}

static_assert(down_token_limit(kHcStaged, 48 * 1024) == 4 && down_token_limit(kHcStaged, 64 * 1024) == 6);
static_assert(down_token_limit(kHcStaged, 99 * 1024) == 8 && down_token_limit(kHcStaged, 227 * 1024) == 8);
static_assert(down_shared_bytes(kHcPlain, kMaxTokens) <= kPlainSharedLimit, "plain and split run on every card");
static_assert(down_shared_bytes(kHcStaged, kExactTokens) <= kPlainSharedLimit);
static_assert(down_shared_bytes(kHcStaged, 3) == down_shared_bytes(kHcRegisterHalf, 3));
static_assert(stream_token_limit(48 * 1024) == 2 && stream_token_limit(64 * 1024) == 4);
static_assert(stream_token_limit(99 * 1024) == 4 && stream_token_limit(227 * 1024) == 8);
static_assert(cluster_down_bytes(4) + cluster_up_asked(4, 227 * 1024) + kReserved <= 227 * 1024);
static_assert(cluster_down_bytes(8) + cluster_up_asked(8, 227 * 1024) + kReserved <= 227 * 1024);
static_assert(cluster_up_asked(4, 227 * 1024) > 227 * 1024 / 2);
static_assert(cluster_fits(8, {227 * 1024, true, true}) && cluster_fits(2, {99 * 1024, true, true}));
static_assert(!cluster_fits(3, {99 * 1024, true, true}) && !cluster_fits(1, {227 * 1024, true, false}));
static_assert(part_count(0, 8) == 0 && token_part(8, 6, 0).count == 4 && token_part(8, 6, 1).first == 4);

}  // namespace strata
