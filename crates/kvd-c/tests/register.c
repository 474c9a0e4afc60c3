/* Registers the model that its arguments name, with the calibration in a file, and prints its id. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "kvd.h"

enum { LAYERS = 10, KV_HEADS = 8, DIM = 64 };

static void *read_file(const char *path, uint64_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) exit(2);
    long size = ftell(file);
    rewind(file);
    void *content = malloc(size > 0 ? (size_t)size : 1);
    if (!content || fread(content, 1, (size_t)size, file) != (size_t)size) exit(2);
    fclose(file);
    *bytes = (uint64_t)size;
    return content;
}

int main(int count, char **arguments) {
    if (count != 5) return 2;
    kvd_error why;
    kvd_connection *connection;
    kvd_options options = {.struct_bytes = sizeof options, .region_path = arguments[1]};
    kvd_model model = {.struct_bytes = sizeof model,
                       .layers = LAYERS,
                       .kv_heads = KV_HEADS,
                       .head_dim_k = DIM,
                       .head_dim_v = DIM,
                       .block_tokens = 64,
                       .dtype = KVD_F16,
                       .rope = KVD_ROPE_HALF,
                       .name = arguments[2],
                       .codec = arguments[3]};
    void *calibration = read_file(arguments[4], &model.calibration_bytes);
    model.calibration = calibration;
    uint64_t id = 0;
    int32_t code = kvd_connect(&options, &connection, &why);
    if (code == KVD_OK) code = kvd_register_model(connection, &model, &id, &why);
    kvd_disconnect(connection);
    free(calibration);
    if (code != KVD_OK) {
        fprintf(stderr, "code %d: %s\n", code, why.message);
        return 1;
    }
    printf("%" PRIu64 "\n", id);
    return 0;
}
