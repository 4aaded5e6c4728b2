// Every path of the CPU backend against the portable one, byte for byte: on buffers that end at forbidden memory (the
// outputs and the scratch too), however the work is cut, in whatever order and on however many threads it is done.
#include "cpu/read.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace strata;

namespace {

// `bytes` bytes that start on a kAlignment boundary and end (but for that) where the next byte may not be touched.
class Guarded {
  public:
    explicit Guarded(std::size_t bytes) : bytes_(bytes) {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        const std::size_t aligned = (bytes + kAlignment - 1) / kAlignment * kAlignment;
        const std::size_t usable = (aligned + page - 1) / page * page;
        length_ = usable + 2 * page;
        map_ = static_cast<char*>(mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(map_, page, PROT_NONE);
        mprotect(map_ + page + usable, page, PROT_NONE);
        data_ = map_ + page + usable - aligned;
        static unsigned char fill = 0;  // another one each time, so that what is never written shows
        std::memset(data_, ++fill, aligned);
    }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;
    ~Guarded() { munmap(map_, length_); }

    template <class T>
    T* as() const {
        return bytes_ == 0 ? nullptr : reinterpret_cast<T*>(data_);
    }
    bool same(const Guarded& other) const { return std::memcmp(data_, other.data_, bytes_) == 0; }
    // As far as the shorter one goes.
    bool begins_as(const Guarded& other) const {
        return std::memcmp(data_, other.data_, std::min(bytes_, other.bytes_)) == 0;
    }

  private:
    std::size_t bytes_, length_;
    char *map_, *data_;
};

struct Random {
    std::uint64_t state;
    std::uint32_t bits() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<std::uint32_t>(state >> 32);
    }
    float next(float scale) { return static_cast<float>(static_cast<std::int32_t>(bits())) * (scale / 2147483648.0f); }
};

struct Options {
    bool fold, inject, q8_1;
    StreamType stream_type = StreamType::Float32;
    // One value in `rare` is any bits at all: NaN, infinite, huge, subnormal. Not in w_norm, where each would reach
    // every token. 0: none.
    std::uint32_t rare = 0;
    // Streams of zeros and weights below zero: every dot is -0, and no sum may be.
    bool zero = false;
};

std::size_t floats(std::int64_t count) { return static_cast<std::size_t>(count) * sizeof(float); }

// The buffers of a read with the same inputs for the same sizes.
struct Read {
    const char* name[7] = {"residual", "w_norm", "w_down", "w_up", "w_inject", "block_out", "inject_prev"};
    std::unique_ptr<Guarded> in[7], out[6], scratch;
    ReadArgs args{};

    Read(const Geometry& g, std::int64_t tokens, const Options& options) {
        const std::int64_t sizes[7] = {tokens * g.depth(),
                                       g.depth(),
                                       g.rank * g.depth(),
                                       g.depth() * g.rank,
                                       options.inject ? g.streams * g.depth() : 0,
                                       options.fold ? tokens * g.width : 0,
                                       options.fold ? tokens * g.streams : 0};
        const float scales[7] = {3.0f, 1.5f, 0.1f, 0.2f, 0.1f, 1.0f, 4.0f};
        for (int i = 0; i < 7; ++i) {
            const bool stream = i == 0 || i == 5;
            const bool bf16 = (i >= 2 && i <= 4) || (stream && options.stream_type == StreamType::BFloat16);
            in[i] = std::make_unique<Guarded>(floats(sizes[i]) / (bf16 ? 2 : 1));
            Random random{static_cast<std::uint64_t>(i) + 1};
            for (std::int64_t k = 0; k < sizes[i]; ++k) {
                const float value = random.next(scales[i]);
                std::uint32_t bits;
                std::memcpy(&bits, &value, sizeof bits);
                if (options.rare != 0 && i != 1 && random.bits() % options.rare == 0) bits = random.bits();
                if (options.zero && stream) bits = 0;
                if (options.zero && i == 1) bits &= 0x7fffffffu;
                if (options.zero && i >= 2 && i <= 4) bits |= 0x80000000u;
                if (bf16) {
                    in[i]->as<std::uint16_t>()[k] = static_cast<std::uint16_t>(bits >> 16);
                } else {
                    in[i]->as<std::uint32_t>()[k] = bits;
                }
            }
        }
        const std::size_t outputs[6] = {
            floats(tokens * g.width),
            options.inject ? floats(tokens * g.streams) : 0,
            options.fold ? static_cast<std::size_t>(tokens * g.depth() * element_bytes(options.stream_type)) : 0,
            floats(tokens * g.rank),
            floats(tokens * g.streams),
            options.q8_1 ? static_cast<std::size_t>(tokens * (g.width / kQ8Block)) * kQ8Bytes : 0};
        for (int i = 0; i < 6; ++i) out[i] = std::make_unique<Guarded>(outputs[i]);
        scratch = std::make_unique<Guarded>(static_cast<std::size_t>(cpu::scratch_size(g, tokens)));
        args = {g,
                tokens,
                1e-6f,
                options.stream_type,
                in[0]->as<char>(),
                in[1]->as<float>(),
                in[2]->as<std::uint16_t>(),
                in[3]->as<std::uint16_t>(),
                in[4]->as<std::uint16_t>(),
                in[5]->as<char>(),
                in[6]->as<float>(),
                out[0]->as<float>(),
                out[1]->as<float>(),
                out[2]->as<char>(),
                out[3]->as<float>(),
                out[4]->as<float>(),
                out[5]->as<std::uint8_t>(),
                scratch->as<char>()};
    }
};

// ---------------------------------------------------------------------------------------------------------------
// Ways to do the work.

using Body = void (*)(std::int64_t, std::int64_t, void*);

void whole(std::int64_t begin, std::int64_t end, std::int64_t, Body body, void* context) { body(begin, end, context); }

void backwards_one_by_one(std::int64_t begin, std::int64_t end, std::int64_t, Body body, void* context) {
    for (std::int64_t unit = end - 1; unit >= begin; --unit) body(unit, unit + 1, context);
}

void uneven_on_three_threads(std::int64_t begin, std::int64_t end, std::int64_t, Body body, void* context) {
    const std::int64_t first = begin + (end - begin) / 7, second = begin + (end - begin) / 2;
    std::thread a([=] { body(begin, first, context); }), b([=] { body(first, second, context); });
    body(second, end, context);
    a.join();
    b.join();
}

constexpr int kOptions = 13;

std::vector<std::string> paths() {
    std::vector<std::string> names;
    std::stringstream text(cpu::paths());
    for (std::string name; std::getline(text, name, ',');) names.push_back(name);
    return names;
}

}  // namespace

int main() {
    const std::vector<std::string> all = paths();
    CHECK(!all.empty() && all.front() == "portable" && all.back() == cpu::default_path(), cpu::paths());
    const char* const names[6] = {"mixed", "inject", "residual_out", "lo", "rs", "q8_1"};
    const struct {
        Geometry geometry;
        std::vector<std::int64_t> tokens;
    } cases[] = {
        {kModelGeometry, {1, 2, 3, 8, 11, 35}},
        {{32, 1, 8}, {1, 4, 8, 9, 64, 65, 130}},
        {{96, 3, 24}, {1, 2, 7, 16, 17, 33, 63}},
        {{1056, 2, 264}, {1, 5, 8, 12, 40}},
        {{64, 8, 40}, {3, 8, 10, 17, 50}},
        {{2048, 4, 320}, {1, 6, 13}},
        {{32, 5, 392}, {9, 33}},       // lanes 16 to 31 of an up row have up to two chunks
        {{64, 2, 520}, {8, 14, 41}},   // an up row that is not packed whole, and of a ragged quad
        {{1312, 8, 16}, {2, 15, 36}},  // a down row of more than one part
    };
    for (const auto& one : cases) {
        std::unique_ptr<const Read> shorter[kOptions];
        for (const std::int64_t tokens : one.tokens) {
            for (int bits = 0; bits < kOptions; ++bits) {
                // 8 and 9 are of bf16 streams: nothing asked for, and everything. 10 and 11 are of unusual values, 12
                // of zeros.
                Options options{(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0};
                if (bits >= 8) options = {bits != 8, bits != 8, bits != 8};
                if (bits == 8 || bits == 9) options.stream_type = StreamType::BFloat16;
                if (bits == 10 || bits == 11) options.rare = bits == 10 ? 20000 : 1;
                options.zero = bits == 12;
                if (tokens > 2 && bits > 0 && bits < 7) continue;
                if (one.geometry.depth() > 4096 && (tokens > 17 || bits > 9) && bits != 7) continue;  // seconds
                Report report;
                auto made = std::make_unique<const Read>(one.geometry, tokens, options);
                const Read &expected = *made, untouched(one.geometry, tokens, options);
                CHECK(cpu::read(expected.args, "portable", whole, &report), report.text);
                for (int i = 0; i < 6 && shorter[bits] != nullptr; ++i) {  // however many tokens follow
                    CHECK(expected.out[i]->begins_as(*shorter[bits]->out[i]), names[i], one.geometry.width, tokens,
                          bits);
                }
                for (const std::string& path : all) {
                    for (const cpu::ParallelFor way : {whole, backwards_one_by_one, uneven_on_three_threads}) {
                        if (way == whole && path == "portable") continue;
                        const Read read(one.geometry, tokens, options);
                        CHECK(cpu::read(read.args, path.c_str(), way, &report), report.text);
                        for (int i = 0; i < 6; ++i) {
                            CHECK(read.out[i]->same(*expected.out[i]), path, names[i], one.geometry.width, tokens,
                                  bits);
                        }
                        for (int i = 0; i < 7; ++i) CHECK(read.in[i]->same(*untouched.in[i]), path, read.name[i]);
                    }
                }
                if (options.fold) {  // in place
                    Read read(one.geometry, tokens, options);
                    read.args.residual_out = read.in[0]->as<char>();
                    CHECK(cpu::read(read.args, nullptr, uneven_on_three_threads, &report), report.text);
                    CHECK(read.in[0]->same(*expected.out[2]) && read.out[0]->same(*expected.out[0]), tokens);
                }
                shorter[bits] = std::move(made);
            }
        }
    }
    Report report;
    const Read read({32, 1, 8}, 1, {});
    CHECK(!cpu::read(read.args, "sse9", whole, &report) && std::strstr(report.text, "sse9") != nullptr, report.text);
    return test::result();
}
