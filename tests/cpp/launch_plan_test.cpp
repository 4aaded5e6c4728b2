// How tokens are cut into launches, and what staged and P4 ask of the card.
#include "common/launch_plan.hpp"

#include "check.hpp"

using namespace strata;

namespace {

constexpr int kKiB[] = {48, 64, 99, 227};

// Tokens a launch for each of kKiB. A staged token takes two tiles of 1280 floats, 10 KiB; a plain one takes one.
struct Limits {
    int variant;
    std::size_t token_bytes;
    int tokens[4];
};

constexpr Limits kLimits[] = {
    {kHcPlain, 5120, {8, 8, 8, 8}},
    {kHcSplit, 5120, {8, 8, 8, 8}},
    {kHcStaged, 10240, {4, 6, 8, 8}},
    {kHcRegisterHalf, 10240, {4, 6, 8, 8}},
};

void slices() {
    for (const Limits& row : kLimits) {
        for (int card = 0; card < 4; ++card) {
            const std::size_t shared = static_cast<std::size_t>(kKiB[card]) * 1024;
            const int limit = down_token_limit(row.variant, shared);
            CHECK(limit == row.tokens[card], row.variant, kKiB[card], limit);

            for (std::int64_t total = 0; total <= 32; ++total) {
                const std::int64_t parts = part_count(total, limit);
                CHECK((parts - 1) * limit < total || total == 0, row.variant, kKiB[card], total);  // none too many
                std::int64_t next = 0;
                int smallest = kMaxTokens, largest = 0;
                for (std::int64_t index = 0; index < parts; ++index) {
                    const TokenPart part = token_part(total, limit, index);
                    CHECK(part.first == next, row.variant, kKiB[card], total, index);
                    CHECK(part.count >= 1 && part.count <= limit, row.variant, kKiB[card], total, index);
                    CHECK(down_shared_bytes(row.variant, part.count) <= shared, row.variant, kKiB[card], part.count);
                    next = part.first + part.count;
                    if (part.count < smallest) smallest = part.count;
                    if (part.count > largest) largest = part.count;
                }
                CHECK(next == total, row.variant, kKiB[card], total, next);
                CHECK(total == 0 || largest - smallest <= 1, row.variant, kKiB[card], total);
            }
        }
    }
}

void plans() {
    for (const bool inject : {false, true}) {
        for (int tokens = 1; tokens <= kMaxTokens; ++tokens) {
            for (const Limits& row : kLimits) {
                const DownPlan plan = down_plan(row.variant, tokens, inject);
                CHECK(plan.grid == (inject ? 41 : 40), row.variant, tokens, plan.grid);
                CHECK(plan.block == 256 && plan.block % 64 == 0, row.variant, tokens, plan.block);
                CHECK(plan.tokens == tokens, row.variant, tokens, plan.tokens);
                CHECK(plan.shared_bytes == row.token_bytes * static_cast<std::size_t>(tokens), row.variant, tokens);
                const bool two_tiles = row.variant == kHcStaged || row.variant == kHcRegisterHalf;
                CHECK(plan.large_shared == two_tiles, row.variant, tokens);
                CHECK(plan.exact == (two_tiles && tokens <= 4), row.variant, tokens);
            }
            const DownPlan staged = down_plan(kHcStaged, tokens, inject);
            const DownPlan p4 = down_plan(kHcRegisterHalf, tokens, inject);
            CHECK(staged.grid == p4.grid && staged.block == p4.block && staged.shared_bytes == p4.shared_bytes &&
                      staged.tokens == p4.tokens && staged.exact == p4.exact && staged.large_shared == p4.large_shared,
                  tokens, inject);
        }
    }
}

void scratch() {
    for (std::int64_t tokens = 0; tokens <= 32; ++tokens) {
        const std::int64_t held = (tokens + 31) / 32 * 32;   // whole tiles of the tiled kernels
        const std::int64_t group = tokens < 8 ? tokens : 8;  // kernels of other geometries take eight at a time
        const std::int64_t offset = scratch_counter_offset(kModelGeometry, tokens);
        CHECK(offset == held * (4 * 2560 + 324 * 16 + 320) * 4, tokens, offset);
        CHECK(scratch_counter_offset({2048, 4, 320}, tokens) == group * 4 * 2048 * 4, tokens);
        CHECK(scratch_bytes(kModelGeometry, tokens) == offset + 80 * 4, tokens);
    }
    CHECK(scratch_bytes(kModelGeometry, 4096) == scratch_bytes(kModelGeometry, 1024),
          "many tokens are cut into groups");
}

// Blocks of the tiled kernels that begin early: as many as are fair fit a unit, and not one more.
void tiled_blocks() {
    for (const std::size_t kib : {std::size_t{99}, std::size_t{227}}) {
        const LaunchLimits limits{kib * 1024, true, false, 132};
        for (unsigned blocks = 1; blocks <= 800; ++blocks) {
            const std::size_t bytes = 33 * 1024;
            const std::size_t each = tiled_asked(bytes, blocks, limits) + 1024;
            const std::size_t unit = limits.shared_bytes + 1024, fair = (blocks + 131) / 132;
            const bool room = fair * (bytes + 1024) <= unit;
            CHECK(each <= unit && each >= bytes + 1024, kib, blocks, each);
            CHECK(!room || fair * each <= unit, kib, blocks, each);
            CHECK((fair + 1) * each > unit, kib, blocks, each);
        }
        CHECK(tiled_asked(1000, 1, {kib * 1024, false, false, 132}) == 1000, "no launch begins early");
        CHECK(tiled_asked(1000, 1, {kib * 1024, true, false, 0}) == 1000, "an unknown card");
    }
}

// The rows of stream's clusters, and what its up kernel asks for beside the down kernel.
void clusters() {
    for (const int instance : kStreamInstances) {
        const int clusters = cluster_count(instance);
        CHECK(clusters * cluster_blocks(instance) == kClusterDownBlocks, instance);
        for (const int rows : {320, 324}) {
            int next = 0;
            for (int cluster = 0; cluster < clusters; ++cluster) {
                CHECK(cluster_first_row(cluster, rows, clusters) == next, rows, cluster);
                next = cluster_first_row(cluster + 1, rows, clusters);
                const int count = next - cluster_first_row(cluster, rows, clusters);
                CHECK(count >= cluster_rows_at_least(instance) && count <= cluster_rows(instance), rows, cluster,
                      count);
            }
            CHECK(next == rows, rows, next);
        }
    }
    // As docs/variants.md says, in KiB.
    struct Size {
        int instance;
        std::size_t kib;
    };
    for (const Size& size : {Size{1, 70}, Size{2, 85}, Size{4, 108}, Size{8, 161}}) {
        const std::size_t bytes = cluster_down_bytes(size.instance);
        CHECK((bytes + 1023) / 1024 == size.kib, size.instance, bytes);
    }
    struct Row {
        int instance;
        std::size_t limit, asked;
    };
    constexpr std::size_t kHopper = 227 * 1024, kSmall = 99 * 1024;
    // More than half of 227 KiB; beside down's 161 KiB only its own.
    for (const Row& row : {Row{1, kHopper, 117248}, Row{2, kHopper, 117248}, Row{4, kHopper, 117248},
                           Row{8, kHopper, 64144}, Row{1, kSmall, 52944}, Row{2, kSmall, 54544}}) {
        const std::size_t asked = cluster_up_asked(row.instance, row.limit);
        CHECK(asked == row.asked, row.instance, row.limit, asked);
    }
}

}  // namespace

int main() {
    slices();
    plans();
    scratch();
    tiled_blocks();
    clusters();
    return strata::test::result();
}
