# sirtaki_flags: how our own sources are compiled. Linked PRIVATE by every target of ours, never exported.
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

add_library(sirtaki_flags INTERFACE)
target_compile_options(sirtaki_flags INTERFACE
  -Wall -Wextra -Wpedantic
  $<$<NOT:$<BOOL:$<TARGET_PROPERTY:SIRTAKI_UNITED_TESTS>>>:-Wshadow> -Wnon-virtual-dtor -Woverloaded-virtual -Wsuggest-override
  -Wcast-align -Wcast-qual -Wformat=2 -Wimplicit-fallthrough -Wextra-semi -Wunused
  $<$<CXX_COMPILER_ID:GNU>:-Wduplicated-cond -Wlogical-op>
  $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>
  -Wno-missing-field-initializers   # what a designated initialiser leaves out is meant to be zero
  # GCC 12 warns wrongly about std::string's and std::vector's own copies (GCC bugs 105651, 105329, 105562).
  $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:
    -Wno-restrict -Wno-stringop-overflow -Wno-stringop-overread -Wno-array-bounds -Wno-maybe-uninitialized>)
if(SIRTAKI_UNITY)   # a source's own types are not its own where several sources are one
  target_compile_options(sirtaki_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endif()
if(SIRTAKI_WERROR)
  target_compile_options(sirtaki_flags INTERFACE -Werror)
endif()

# sirtaki_compile_fast(<target>): optimized little, since nobody waits for what it does, and compiled in two thirds of the time.
function(sirtaki_compile_fast target)
  if(CMAKE_BUILD_TYPE STREQUAL "Release" AND NOT SIRTAKI_SANITIZE)
    target_compile_options(${target} PRIVATE -O1)
  endif()
endfunction()

if(SIRTAKI_SANITIZE)
  # For everything of ours, so not on sirtaki_flags: a test's main needs it at link time too.
  # Null pointers end the program anyway, and two of Highway's five targets have every way of ours through a vector: both
  # halve the time of the compiler.
  add_compile_options(-fsanitize=${SIRTAKI_SANITIZE} -fno-sanitize=null -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_compile_definitions("HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4|HWY_AVX3|HWY_AVX3_DL)")
  add_link_options(-fsanitize=${SIRTAKI_SANITIZE})
  # The instrumentation itself confuses GCC's flow analysis.
  target_compile_options(sirtaki_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
endif()

set(sirtaki_ccache_status "off: SIRTAKI_CCACHE=OFF")
if(SIRTAKI_CCACHE)
  find_program(SIRTAKI_CCACHE_PROGRAM ccache)
  if(NOT SIRTAKI_CCACHE_PROGRAM)
    set(sirtaki_ccache_status "off: not installed")
  elseif(CMAKE_CXX_COMPILER_LAUNCHER)
    set(sirtaki_ccache_status "off: a compiler launcher is set already")
  else()
    set(sirtaki_ccache_status "${SIRTAKI_CCACHE_PROGRAM}")
    # ccache handles a precompiled header only when allowed to overlook its macros and __TIME__.
    set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${SIRTAKI_CCACHE_PROGRAM})
  endif()
endif()

if(SIRTAKI_CLANG_TIDY)
  find_program(SIRTAKI_CLANG_TIDY_PROGRAM NAMES clang-tidy-14 clang-tidy REQUIRED)
  set(CMAKE_CXX_CLANG_TIDY ${SIRTAKI_CLANG_TIDY_PROGRAM}
    --quiet --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wthread-safety)
endif()
