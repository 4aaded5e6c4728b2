// The card's global memory: which addresses a kernel may touch, how large each piece is and whether it may write it.
// Pieces come from the card's own allocator, or are declared by a caller who lends its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace strata::sim {

// What a strict launch knows of one word of a writable buffer. Times are the executor's; threads are numbered through
// all blocks of a launch. Time 0: not yet.
struct GlobalWord {
    std::uint64_t written = 0;  // the last write
    std::uint64_t read = 0;     // the last read
    std::uint32_t writer = 0;
    std::uint32_t reader = 0;
    bool defined = false;  // holds a value
    bool atomic = false;   // the last write was an atomic operation
};

struct Buffer {
    std::string name;
    char* begin = nullptr;
    std::size_t bytes = 0;
    bool writable = true;
    bool defined = true;  // holds values from the start
    bool owned = false;   // came from the card's allocator
    std::unique_ptr<GlobalWord[]> words;

    bool holds(const void* address) const { return address >= begin && address < begin + bytes; }
};

class Memory {
  public:
    Memory() = default;
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    void* allocate(std::size_t bytes);  // null where they are not to be had
    bool release(void* pointer);        // false: it was not allocated here

    // Where two pieces overlap, the one that was declared first is found.
    void declare(const char* name, const void* begin, std::size_t bytes, bool writable, bool defined);
    void withdraw_declared();

    // Says that the host has written these bytes.
    void define(const void* begin, std::size_t bytes);

    Buffer* find(const void* address);

    // Of an address in no buffer, for errors: "12 bytes past the end of 'rs' (64 bytes)".
    std::string describe(const void* address) const;

    std::size_t allocations() const;

  private:
    std::vector<std::unique_ptr<Buffer>> buffers_;
    Buffer* last_ = nullptr;
};

}  // namespace strata::sim
