# The CUDA library: whether it is built, with which nvcc, for which cards, by which flags.

# ---------------------------------------------------------------------------------------------------------------------
# Whether

strata_check_choice(CUDA)
if(STRATA_CUDA STREQUAL "OFF" OR (STRATA_CUDA STREQUAL "AUTO" AND NOT STRATA_TORCH_cuda))
  return()
endif()

find_program(STRATA_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
set(trouble "")
if(NOT STRATA_NVCC)
  set(trouble "no nvcc is on PATH, in CUDA_HOME or in /usr/local/cuda")
else()
  execute_process(COMMAND ${STRATA_NVCC} --version OUTPUT_VARIABLE nvcc_says ERROR_VARIABLE nvcc_says)
  string(REGEX MATCH "V([0-9]+\\.[0-9]+)" _ "${nvcc_says}")
  set(nvcc_version "${CMAKE_MATCH_1}")
  if(NOT nvcc_version)
    set(trouble "${STRATA_NVCC} does not tell its version")
  elseif(nvcc_version VERSION_LESS 12.8)
    set(trouble "nvcc 12.8 or later is needed, and ${STRATA_NVCC} is ${nvcc_version}")
  endif()
endif()
if(trouble)
  unset(STRATA_NVCC CACHE)
  strata_cannot_build(CUDA "${trouble}")
endif()

# ---------------------------------------------------------------------------------------------------------------------
# For which cards

set(arch_list "$ENV{TORCH_CUDA_ARCH_LIST}")
if(NOT arch_list)
  set(arch_list "7.5 8.0 8.6 8.9 9.0 10.0 12.0+PTX")
endif()
string(REGEX MATCHALL "[^ ;,]+" arch_list "${arch_list}")
execute_process(COMMAND ${STRATA_NVCC} --list-gpu-code OUTPUT_VARIABLE known_codes ERROR_QUIET)
string(REGEX MATCHALL "sm_[0-9a-z]+" known_codes "${known_codes}")
set(gencode "")
set(built_for "")
set(bad "")
foreach(item IN LISTS arch_list)
  if(NOT item MATCHES "^([0-9]+)\\.([0-9][af]?)(\\+PTX)?$")
    list(APPEND bad "'${item}' (write 9.0 or 9.0+PTX)")
    continue()
  endif()
  set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
  set(ptx "${CMAKE_MATCH_3}")
  string(REGEX REPLACE "[af]$" "" plain_number "${number}")
  if(plain_number LESS 75)
    list(APPEND bad "'${item}' (7.5 is the oldest)")
  elseif(NOT "sm_${plain_number}" IN_LIST known_codes)
    list(APPEND bad "'${item}' (nvcc ${nvcc_version} does not know it)")
  else()
    set(codes sm_${number})
    if(ptx)
      list(APPEND codes compute_${number})
    endif()
    list(APPEND built_for ${codes})
    string(REPLACE ";" "," codes "${codes}")
    list(APPEND gencode "-gencode=arch=compute_${number},code=[${codes}]")
  endif()
endforeach()
if(bad)
  list(JOIN bad ", " bad)
  strata_stop("TORCH_CUDA_ARCH_LIST: ${bad}")
endif()
list(JOIN built_for " " built_for)
message(STATUS "CUDA library: nvcc ${nvcc_version} for ${built_for}")

# ---------------------------------------------------------------------------------------------------------------------
# By which flags

set(CMAKE_CUDA_COMPILER ${STRATA_NVCC})
set(CMAKE_CUDA_ARCHITECTURES OFF) # said by `gencode`
set(CMAKE_CUDA_RUNTIME_LIBRARY Static) # any driver that is new enough will do, whichever runtime torch brings
enable_language(CUDA)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)

# For tests/test_cuda.py: a library with a fault of csrc/gpu/faults.hpp in P4, whose gate takes a card for another one.
#
#   cmake -S . -B build/fault -G Ninja -DPython_EXECUTABLE=$(which python3) -DSTRATA_CUDA=ON -DSTRATA_HIP=OFF \
#       -DSTRATA_SIM=OFF -DSTRATA_FAULT=kOutOfBounds -DSTRATA_FAULT_ARCHITECTURE=gfx1201
#   cmake --build build/fault --target strata_cuda          # build/fault/libstrata_cuda.so
set(STRATA_FAULT "" CACHE STRING "For tests: the fault of csrc/gpu/faults.hpp that P4 has in the CUDA library")
set(STRATA_FAULT_ARCHITECTURE "" CACHE STRING "For tests: the architecture that the CUDA library's gate sees")
if(STRATA_FAULT OR STRATA_FAULT_ARCHITECTURE)
  set(built_for "${built_for} (for tests: ${STRATA_FAULT} ${STRATA_FAULT_ARCHITECTURE})")
endif()

file(GLOB gpu_sources CONFIGURE_DEPENDS csrc/gpu/*.cu)
strata_backend_library(strata_cuda ${gpu_sources} csrc/torch/gpu.cpp)
if(STRATA_FAULT)
  target_compile_definitions(strata_cuda PRIVATE STRATA_FAULT=${STRATA_FAULT})
endif()
if(STRATA_FAULT_ARCHITECTURE)
  target_compile_definitions(strata_cuda PRIVATE STRATA_FAULT_ARCHITECTURE="${STRATA_FAULT_ARCHITECTURE}")
endif()
target_link_libraries(strata_cuda PRIVATE ${CMAKE_DL_LIBS})
target_compile_definitions(strata_cuda PRIVATE STRATA_BUILT_FOR="${built_for}")
# The host compiler's flags without -Wpedantic: what nvcc writes for it does not keep to that.
list(JOIN STRATA_HOST_FLAGS "," host_flags)
target_compile_options(
  strata_cuda
  PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${gencode}
          -fmad=false
          -prec-div=true
          -prec-sqrt=true
          -ftz=false
          $<$<BOOL:${STRATA_WARNINGS_ARE_ERRORS}>:-Werror=all-warnings>
          -Xcompiler=${host_flags}
          -lineinfo
          --threads=2
          -Xptxas=-v>)
# What ptxas says of registers and spills is kept beside each object file; tests/test_build.py reads it.
set_target_properties(strata_cuda PROPERTIES CUDA_SEPARABLE_COMPILATION OFF
                                             CUDA_COMPILER_LAUNCHER ${CMAKE_CURRENT_LIST_DIR}/keep_output.sh)
