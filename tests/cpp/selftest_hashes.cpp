// Makes or checks csrc/common/selftest_hashes.hpp, the CPU's answers to the self-test's cases.
//
//   selftest_hashes                checks the built-in table against this processor, on every path it has
//   selftest_hashes --write FILE   writes the table anew; a change of it is a change of kArithmeticVersion
#include "common/selftest_hashes.hpp"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "common/selftest_cases.hpp"
#include "cpu/read.hpp"

using namespace strata;

namespace {

void inline_for(std::int64_t begin, std::int64_t end, std::int64_t, void (*body)(std::int64_t, std::int64_t, void*),
                void* context) {
    body(begin, end, context);
}

struct alignas(16) Block {
    unsigned char bytes[16];
};

// `count` values on a 16-byte boundary.
template <class T>
struct Buffer {
    std::vector<Block> blocks;
    explicit Buffer(std::int64_t count)
        : blocks((static_cast<std::size_t>(count) * sizeof(T) + sizeof(Block) - 1) / sizeof(Block)) {}
    T* data() { return reinterpret_cast<T*>(blocks.data()); }
};

Buffer<float> floats(SelftestInput input, std::int64_t count) {
    Buffer<float> made(count);
    for (std::int64_t i = 0; i < count; ++i) made.data()[i] = selftest_value(input, static_cast<std::uint64_t>(i));
    return made;
}

Buffer<std::uint16_t> halves(SelftestInput input, std::int64_t count) {
    Buffer<std::uint16_t> made(count);
    for (std::int64_t i = 0; i < count; ++i) made.data()[i] = selftest_bf16(input, static_cast<std::uint64_t>(i));
    return made;
}

struct Hashes {
    std::uint64_t of[kSelftestOutputs];
};

std::vector<Hashes> answers(const char* path) {
    const Geometry g = kModelGeometry;
    auto residual = floats(SelftestInput::Residual, kMaxTokens * g.depth());
    auto block_out = floats(SelftestInput::BlockOut, kMaxTokens * g.width);
    auto residual_bf16 = halves(SelftestInput::Residual, kMaxTokens * g.depth());
    auto block_out_bf16 = halves(SelftestInput::BlockOut, kMaxTokens * g.width);
    auto inject_prev = floats(SelftestInput::InjectPrev, kMaxTokens * g.streams);
    auto w_norm = floats(SelftestInput::WNorm, g.depth());
    auto w_down = halves(SelftestInput::WDown, g.rank * g.depth());
    auto w_up = halves(SelftestInput::WUp, g.rank * g.depth());
    auto w_inject = halves(SelftestInput::WInject, g.streams * g.depth());
    Buffer<unsigned char> scratch(cpu::scratch_size(g, kMaxTokens));

    std::vector<Hashes> all;
    for (int index = 0; index < kSelftestCases; ++index) {
        const SelftestCase c = selftest_case(index);
        const bool bf16 = c.stream_type == StreamType::BFloat16;
        std::int64_t sizes[kSelftestOutputs];
        for (int i = 0; i < kSelftestOutputs; ++i) sizes[i] = selftest_output_bytes(c, i);
        std::vector<Buffer<unsigned char>> outputs;
        for (const std::int64_t size : sizes) outputs.emplace_back(size);
        const auto output = [&](int i) {
            return sizes[i] == 0 ? nullptr : reinterpret_cast<float*>(outputs[static_cast<std::size_t>(i)].data());
        };
        ReadArgs args{};
        args.geometry = g;
        args.tokens = c.tokens;
        args.eps = kSelftestEps;
        args.stream_type = c.stream_type;
        args.residual = bf16 ? static_cast<const void*>(residual_bf16.data()) : residual.data();
        args.w_norm = w_norm.data();
        args.w_down = w_down.data();
        args.w_up = w_up.data();
        args.w_inject = c.inject ? w_inject.data() : nullptr;
        args.block_out = !c.fold ? nullptr : bf16 ? static_cast<const void*>(block_out_bf16.data()) : block_out.data();
        args.inject_prev = c.fold ? inject_prev.data() : nullptr;
        args.mixed = output(0);
        args.inject = output(1);
        args.residual_out = output(2);
        args.lo = output(3);
        args.rs = output(4);
        args.q8_1 = reinterpret_cast<std::uint8_t*>(output(5));
        args.scratch = scratch.data();
        Report report;
        if (!cpu::read(args, path, inline_for, &report)) {
            std::fprintf(stderr, "selftest_hashes: %s\n", report.text);
            std::exit(2);
        }
        Hashes hashes{};
        for (int i = 0; i < kSelftestOutputs; ++i) {
            if (sizes[i] == 0) continue;
            std::uint64_t hash = kSelftestHashStart;
            for (std::int64_t at = 0; at < sizes[i]; at += 4) {
                std::uint32_t word;
                std::memcpy(&word, outputs[static_cast<std::size_t>(i)].data() + at, sizeof word);
                hash = selftest_hash(hash, word);
            }
            hashes.of[i] = hash;
        }
        all.push_back(hashes);
    }
    return all;
}

int write(const char* file) {
    std::FILE* out = std::fopen(file, "w");
    if (out == nullptr) {
        std::perror(file);
        return 2;
    }
    std::fprintf(
        out,
        "// The CPU's answers to the self-test's cases, as hashes. Made by `make selftest-hashes`, proved by the\n"
        "// C++ test of that name; a GPU whose plain variant gives other bits is not used.\n"
        "#pragma once\n\n"
        "#include \"common/selftest_cases.hpp\"\n\n"
        "namespace strata {\n\n"
        "inline constexpr int kSelftestHashesVersion = %d;\n"
        "static_assert(kSelftestHashesVersion == kArithmeticVersion, \"make selftest-hashes\");\n\n"
        "// clang-format off\n"
        "inline constexpr std::uint64_t kSelftestHashes[kSelftestCases][kSelftestOutputs] = {\n",
        kArithmeticVersion);
    for (const Hashes& hashes : answers("portable")) {
        std::fprintf(out, "    {");
        for (int i = 0; i < kSelftestOutputs; ++i) {
            std::fprintf(out, "%s0x%016llxull", i == 0 ? "" : ", ", static_cast<unsigned long long>(hashes.of[i]));
        }
        std::fprintf(out, "},\n");
    }
    std::fprintf(out, "};\n// clang-format on\n\n}  // namespace strata\n");
    return std::fclose(out) == 0 ? 0 : 2;
}

int check() {
    int wrong = 0;
    const std::string paths = std::string(cpu::paths()) + ",";
    for (std::size_t begin = 0; begin < paths.size(); begin = paths.find(',', begin) + 1) {
        const std::string path = paths.substr(begin, paths.find(',', begin) - begin);
        const std::vector<Hashes> all = answers(path.c_str());
        for (int index = 0; index < kSelftestCases; ++index) {
            for (int i = 0; i < kSelftestOutputs; ++i) {
                if (all[static_cast<std::size_t>(index)].of[i] == kSelftestHashes[index][i]) continue;
                const SelftestCase c = selftest_case(index);
                std::printf("%s: T=%d %s fold=%d inject=%d q8_1=%d: %s differs from the table\n", path.c_str(),
                            c.tokens, stream_name(c.stream_type), c.fold, c.inject, c.q8_1, kSelftestOutputNames[i]);
                ++wrong;
            }
        }
        std::printf("%s: %d cases\n", path.c_str(), kSelftestCases);
    }
    return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc == 3 && std::strcmp(argv[1], "--write") == 0) return write(argv[2]);
    if (argc != 1) {
        std::fprintf(stderr, "usage: selftest_hashes [--write FILE]\n");
        return 2;
    }
    return check();
}
