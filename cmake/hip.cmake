# The HIP library: whether it is built, with which compiler, for which cards, by which flags.
#
# The compiler is called by command, not as a CMake language: that works alike with ROCm's hipcc, with a plain clang and
# Debian's packages, and with headers of another version, and asks of CMake no more than 3.22. What hip_facts.py says
# decides; its first lines name the variables.

# ---------------------------------------------------------------------------------------------------------------------
# Whether

set(STRATA_HIP AUTO CACHE STRING "HIP library: AUTO as the installed torch has it, TRY where there is a compiler, ON, OFF")
set_property(CACHE STRATA_HIP PROPERTY STRINGS AUTO TRY ON OFF)
strata_check_choice(HIP)
if(STRATA_HIP STREQUAL "OFF" OR (STRATA_HIP STREQUAL "AUTO" AND NOT STRATA_TORCH_hip))
  return()
endif()

strata_facts(facts hip_facts.py --bitcode ${PROJECT_BINARY_DIR}/hip_bitcode)
foreach(key IN ITEMS missing compiler version headers archs unknown)
  set(hip_${key} "")
  if(facts MATCHES "(^|\n)${key}=([^\n]*)")
    set(hip_${key} "${CMAKE_MATCH_2}")
  endif()
endforeach()

# The runtime that torch itself uses where it brings one: a second copy in the process would know nothing of its
# streams. Torch's libtorch_hip is not linked (csrc/torch/gpu.cpp finds it in the process), so it needs no stub either.
get_filename_component(torch_libraries "${STRATA_TORCH_library}" DIRECTORY)
find_library(
  STRATA_AMDHIP64 amdhip64
  HINTS ${torch_libraries} $ENV{ROCM_PATH}/lib
  PATHS /opt/rocm/lib)
if(NOT hip_missing AND NOT STRATA_AMDHIP64)
  set(hip_missing "there is a compiler, but no libamdhip64")
endif()
if(hip_missing)
  unset(STRATA_AMDHIP64 CACHE)
  strata_cannot_build(HIP "${hip_missing}")
endif()
list(JOIN hip_archs " " built_for)
message(STATUS "HIP library: ${hip_version}, HIP ${hip_headers} headers, for ${built_for}")
if(hip_unknown)
  message(STATUS "  this compiler does not know ${hip_unknown}")
endif()

# ---------------------------------------------------------------------------------------------------------------------
# By which flags

list(TRANSFORM hip_archs PREPEND --offload-arch= OUTPUT_VARIABLE offload)
file(GLOB gpu_sources CONFIGURE_DEPENDS csrc/gpu/*.cu)
set(hip_objects "")
foreach(source IN LISTS gpu_sources)
  get_filename_component(name ${source} NAME)
  set(object ${PROJECT_BINARY_DIR}/hip/${name}.o)
  add_custom_command(
    OUTPUT ${object}
    COMMAND
      ${hip_compiler} ${offload} -std=c++17 -O3 -DNDEBUG -fPIC -fvisibility=hidden -fvisibility-inlines-hidden
      # The arithmetic contract: hip's own defaults are not IEEE's everywhere.
      -fhip-fp32-correctly-rounded-divide-sqrt ${STRATA_HOST_FLAGS} -DSTRATA_BUILT_FOR="${built_for}"
      -I${PROJECT_SOURCE_DIR}/csrc -MD -MF ${object}.d -c ${source} -o ${object}
    DEPENDS ${source}
    DEPFILE ${object}.d
    COMMENT "Building HIP object hip/${name}.o"
    VERBATIM)
  list(APPEND hip_objects ${object})
endforeach()
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/hip)

strata_backend_library(strata_hip ${hip_objects} csrc/torch/gpu.cpp)
target_link_libraries(strata_hip PRIVATE ${STRATA_AMDHIP64} ${CMAKE_DL_LIBS})
